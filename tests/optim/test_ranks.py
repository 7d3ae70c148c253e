"""Ranks started by torchrun on gloo give the trajectory of one process on the joined batches."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ranks
from processes import PATIENCE

HERE = Path(__file__).parent
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
ON_TWO = (
    "ddp ddp_with_views ddp_clipped accumulated fsdp fsdp_clipped fsdp_wide fsdp_low_precision "
    "fsdp_holes fsdp_scaled tensor checkpointed refusals ddp_variants fsdp_variants "
    "fsdp_variants_resumed"
)
ON_FOUR = (
    "ddp fsdp fsdp_clipped fsdp_replicated fsdp_mixed fsdp_scaled tensor tensor_and_fsdp resumed"
)


def torchrun(number, *script):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(number),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *map(str, script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """All scenarios on 2 ranks, then all on 4, some of which load checkpoints of the 2 ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    for number, names in ((2, ON_TWO), (4, ON_FOUR)):
        done = torchrun(number, HERE / "ranks.py", folder, *names.split())
        assert done.returncode == 0, done.stderr[-5000:]

    def read(name, number):
        return [
            torch.load(folder / f"{name}-{number}-{rank}.pt", weights_only=True)
            for rank in range(number)
        ]

    read.folder = folder
    return read


def alone(iterations=15, sizes=(6, 8, 7, 3), options=(), network=None, **kind):
    model = network or ranks.Network(sizes)
    return ranks.walk(model, ranks.make_optimizer(model, **dict(options)), iterations, **kind)


def assert_same_everywhere(found):
    for other in found[1:]:
        for name, value in found[0].items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other[name]), f"{name} differs between ranks"


def assert_same_way(found, expected):
    assert_same_everywhere(found)
    for name in found[0].keys() & {"theta", "gamma", "curvature"}:
        torch.testing.assert_close(
            found[0][name], expected[name], **CLOSE, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_the_problem_makes_gamma_move():
    gamma = alone(200)["gamma"]
    assert gamma.min() < 0.5
    assert gamma.max() == 10
    assert len(gamma.unique()) > 100


@pytest.mark.parametrize(
    ("name", "number", "iterations"), [("ddp", 2, 200), ("ddp", 4, 200), ("ddp_with_views", 2, 20)]
)
def test_ddp_equals_one_process_on_the_joined_mini_batch(results, name, number, iterations):
    found = results(name, number)
    assert len(found[0]["theta"]) == iterations
    assert_same_way(found, alone(iterations))


def test_ddp_with_clipping_and_without_collectives_of_the_optimizer(results):
    found = results("ddp_clipped", 2)
    assert_same_way(found, alone(10, options={"max_grad_norm": 0.3}))
    assert all(counts == [0, 0] for counts in found[0]["collectives"])


def test_accumulation_without_synchronisation_equals_the_large_mini_batch(results):
    assert_same_way(results("accumulated", 2), alone(10))


@pytest.mark.parametrize(("name", "number"), [("fsdp", 2), ("fsdp", 4), ("fsdp_replicated", 4)])
def test_fully_shard_equals_one_process_with_one_collective_per_iteration(results, name, number):
    found = results(name, number)
    assert_same_way(found, alone())
    assert all(counts == [0, 1] for counts in found[0]["collectives"])


@pytest.mark.parametrize("number", [2, 4])
def test_clipping_adds_one_collective_per_pass(results, number):
    found = results("fsdp_clipped", number)
    assert_same_way(found, alone(10, options={"max_grad_norm": 0.3}))
    assert all(counts == [1, 2] for counts in found[0]["collectives"])


def test_parameters_on_several_meshes_and_on_none(results):
    found = results("fsdp_mixed", 4)
    assert_same_way(found, alone())
    assert all(counts == [0, 2] for counts in found[0]["collectives"])


def test_shards_are_processed_in_chunks(results):
    assert_same_way(results("fsdp_wide", 2), alone(4, (300, 900, 3), {"lr": 0.02}, inputs=300))


@pytest.mark.filterwarnings("ignore:parameters are torch.bfloat16")
def test_low_precision_shards(results):
    found = results("fsdp_low_precision", 2)
    assert_same_everywhere(found)
    expected = alone(10, network=ranks.Network(dtype=torch.bfloat16), dtype=torch.bfloat16)
    assert torch.equal(found[0]["theta"], expected["theta"])
    torch.testing.assert_close(found[0]["gamma"], expected["gamma"], rtol=1e-6, atol=0)


def test_a_layer_that_is_used_in_some_passes_only(results):
    assert_same_way(results("fsdp_holes", 2), alone(12, network=ranks.WithExtra()))


@pytest.mark.parametrize("number", [2, 4])
def test_an_overflow_on_one_rank_is_an_overflow_on_all(results, number):
    found = results("fsdp_scaled", number)
    expected = ranks.scaled(ranks.Network())
    assert_same_way(found, expected)
    assert torch.equal(found[0]["scale"], expected["scale"])
    assert expected["scale"][3] < expected["scale"][2]


@pytest.mark.parametrize("number", [2, 4])
def test_tensor_parallel_parameters(results, number):
    found = results("tensor", number)
    assert_same_way(found, alone(sizes=(6, 8, 8, 3)))
    assert all(counts == [0, 1] for counts in found[0]["collectives"])


@pytest.mark.parametrize("name", ranks.VARIANTS)
def test_a_variant_on_ranks_equals_one_process(results, name):
    expected = ranks.walk(*ranks.pair(ranks.Network(), ranks.VARIANTS[name]), 20)
    clips = "base" in ranks.VARIANTS[name]
    for kind, collectives in (("ddp", [0, 0]), ("fsdp", [clips, 1 + clips])):
        found = [each[name] for each in results(f"{kind}_variants", 2)]
        assert_same_way(found, expected)
        for counts in found[0]["collectives"]:
            assert counts == (collectives if len(counts) == 2 else collectives[:1]), (
                "no more for a single pass than for clipping"
            )


@pytest.mark.parametrize("name", ranks.VARIANTS)
@pytest.mark.parametrize("moment", ranks.MOMENTS)
def test_a_variant_on_ranks_resumes_from_a_distributed_checkpoint(results, name, moment):
    model, opt = ranks.pair(ranks.Network(), ranks.VARIANTS[name])
    ranks.advance(model, opt, 0, ranks.PASSES)
    found = [each[name, moment] for each in results("fsdp_variants_resumed", 2)]
    assert_same_way(found, {"theta": ranks.theta(model), "gamma": opt.gamma})


def test_tensor_parallel_and_fully_shard_together(results):
    """The last layer is not tensor-parallel, so it is on a separate mesh."""
    found = results("tensor_and_fsdp", 4)
    assert_same_way(found, alone(sizes=(6, 8, 8, 3)))
    assert all(counts == [0, 2] for counts in found[0]["collectives"])


@pytest.fixture(scope="module")
def straight():
    model = ranks.Network()
    opt = ranks.make_optimizer(model)
    ranks.go_on(model, opt, 0)
    return {"theta": ranks.theta(model), "gamma": opt.gamma}


@pytest.mark.parametrize("begin", [8, 9])
def test_a_checkpoint_of_two_ranks_resumes_on_four(results, straight, begin):
    assert_same_way(results("checkpointed", 2), straight)
    assert_same_way([found[begin] for found in results("resumed", 4)], straight)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("begin", [8, 9])
def test_a_checkpoint_of_two_ranks_resumes_on_one(results, straight, begin):
    model = ranks.Network()
    opt = ranks.make_optimizer(model, lr=0.7)
    ranks.load(model, opt, results.folder / f"after-{begin}")
    assert bool(opt.param_groups[0]["pending"]) == (begin == 9)
    ranks.go_on(model, opt, begin)
    assert_same_way([{"theta": ranks.theta(model), "gamma": opt.gamma}], straight)


def test_a_dead_rank_ends_the_others_and_a_restart_resumes(tmp_path, straight):
    done = torchrun(2, HERE / "ranks.py", tmp_path, "killed")
    assert done.returncode == 1
    assert "Signal 9 (SIGKILL)" in done.stderr
    assert "local_rank: 1" in done.stderr
    assert not list(tmp_path.glob("*.pt"))
    assert (tmp_path / "saved-14").exists()
    done = torchrun(2, HERE / "ranks.py", tmp_path, "killed")
    assert done.returncode == 0, done.stderr[-5000:]
    assert_same_way(
        [torch.load(tmp_path / f"killed-2-{rank}.pt", weights_only=True) for rank in range(2)],
        straight,
    )


def test_without_torchrun_the_survivor_reports_that_its_peer_is_gone(tmp_path):
    """As on another node, where no agent sees the process that died."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    command = [sys.executable, str(HERE / "ranks.py"), str(tmp_path), "killed"]
    both = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": rank},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    said = [process.communicate(timeout=PATIENCE)[1] for process in both]
    assert [process.returncode for process in both] == [1, -9]
    assert "closed by peer" in said[0] or "reset by peer" in said[0]


def free_port():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


SCRIPTS = re.findall(
    r"```python\n(# (\w+\.py).*?)```",
    (HERE.parents[1] / "docs" / "scaling.md").read_text(),
    re.DOTALL,
)


@pytest.mark.parametrize(("code", "name"), SCRIPTS, ids=[name for _, name in SCRIPTS])
def test_the_scripts_of_the_documents_run(tmp_path, code, name):
    (tmp_path / name).write_text(code)
    done = torchrun(2, tmp_path / name)
    if "terminate called without an active exception" in done.stderr:
        # On a busy machine torch sometimes aborts, without a Python error, as a process exits.
        done = torchrun(2, tmp_path / name)
    assert done.returncode == 0, done.stderr[-5000:]


def test_what_is_not_supported_is_refused(results):
    first, other = results("refusals", 2)
    for said in (first, other):
        assert "ValueError: StepTunedSGD does not support ZeroRedundancyOptimizer" in said["ZeRO"]
        assert "ValueError: StepTunedSGD does not support FullyShardedDataParallel" in said["FSDP1"]
        assert (
            "ValueError: StepTunedSGD does not support FullyShardedDataParallel"
            in said["FSDP1, its parameters"]
        )
        assert (
            "ValueError: this state_dict is sharded differently from the parameters"
            in said["another way"]
        )
        assert (
            "ValueError: this state_dict is sharded differently from the parameters"
            in said["and back"]
        )
        assert (
            said["Algorithm 1"]
            == "ValueError: StepTunedGD does not support sharded parameters (DTensor, FSDP2); "
            "StepTunedSGD does"
        )
        assert (
            said["Armijo"]
            == "ValueError: ArmijoGD does not support sharded parameters (DTensor, FSDP2); "
            "StepTunedSGD does"
        )
        assert (
            "RuntimeError: a GradScaler sees an overflow only on the mesh of the first parameter"
            in said["several places"]
        )
        torch.testing.assert_close(said["untouched"], alone(1)["theta"][0], **CLOSE)
    assert first["elsewhere"] == "nothing"
    assert (
        "ValueError: StepTunedSGD got a parameter on a mesh that this rank is not in"
        in other["elsewhere"]
    )
