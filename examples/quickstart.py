"""Train a small network with Step-Tuned SGD. Run: python examples/quickstart.py"""

import torch
from torch import nn

from steptuned import StepTunedSGD

torch.manual_seed(0)
inputs = torch.rand(2000, 2) * 6 - 3
targets = (torch.sin(inputs[:, 0]) * torch.cos(inputs[:, 1])).unsqueeze(1)
dataset = torch.utils.data.TensorDataset(inputs, targets)
loader = torch.utils.data.DataLoader(dataset, batch_size=50, shuffle=True)

model = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
criterion = nn.MSELoss()
opt = StepTunedSGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=30)

for epoch in range(1, 31):
    total = 0.0
    for x, y in loader:

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            opt.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            return loss

        total += opt.step(closure).item()
    scheduler.step()
    if epoch % 5 == 0:
        print(f"epoch {epoch:2}: loss {total / len(loader):.5f}, gamma {opt.gamma.item():.3f}")

stats = opt.stats()
print(
    f"{stats.iterations} iterations: curvature negative in {stats.negative:.0%}, "
    f"gamma at its lower bound in {stats.at_lower:.0%}, at its upper in {stats.at_upper:.0%}"
)
