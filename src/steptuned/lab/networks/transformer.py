"""A small decoder-only transformer that predicts the next symbol at every position."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Causal attention, then an MLP, each with a residual connection and pre-norm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.joined(self._attention(self.norm1(x))))
        return x + self.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm2(x)))))

    def _attention(self, x: Tensor) -> Tensor:
        batch, places, width = x.shape
        q, k, v = (
            self.queries_keys_values(x)
            .view(batch, places, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return seen.transpose(1, 2).reshape(batch, places, width)


class Transformer(nn.Module):
    """Scores for the next symbol at each of up to ``context`` positions.

    Initialised as GPT-2: weights from N(0, 0.02^2), those of the last layer of each residual branch
    divided by sqrt(2 depth), biases 0.
    """

    def __init__(
        self, symbols: int, context: int, width: int, depth: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.places = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                ends_branch = name.endswith((".joined", ".narrow"))
                nn.init.normal_(
                    module.weight, std=0.02 / (2 * depth) ** 0.5 if ends_branch else 0.02
                )
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        scores: Tensor = self.head(
            self.norm(self.blocks(self.dropout(self.symbols(x) + self.places(places))))
        )
        return scores
