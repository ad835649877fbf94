"""Trains a tiny Llama or MoE along a plan's degrees with PyTorch's own parallelism, on CPU with gloo.

usage, once per process with RANK and WORLD_SIZE set: gloo_run.py PLAN.json
PLAN.json: the fields of a plan's layout, and "experts" (0 in a dense model). With WORLD_SIZE 1 the same model
is trained without any parallelism. Rank 0 prints one JSON line: the losses of the steps, the groups of every
axis and the process of every rank. Needs torch only.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, SEQ, STEPS = 64, 8, 4, 128, 96, 16, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = HIDDEN // HEADS
        self.wq = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.wk = nn.Linear(HIDDEN, KV_HEADS * width, bias=False)
        self.wv = nn.Linear(HIDDEN, KV_HEADS * width, bias=False)
        self.wo = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The number of heads is whatever tensor parallelism has left on this rank.
        q, k, v = (
            w(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, FFN, bias=False)
        self.w3 = nn.Linear(HIDDEN, FFN, bias=False)
        self.w2 = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Exchange(torch.autograd.Function):
    """All-to-all along the first dimension, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad, group=ctx.group)
        return out, None


class Experts(nn.Module):
    """Top-2 experts; with expert parallelism every rank keeps its share and tokens travel there and back."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.router = nn.Linear(HIDDEN, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, HIDDEN, FFN) * 0.1)
        self.down = nn.Parameter(torch.randn(count, FFN, HIDDEN) * 0.1)
        self.group: Any = None

    def keep(self, mesh: DeviceMesh) -> None:
        share, rank = self.count // mesh.size(), mesh.get_local_rank()
        mine = slice(rank * share, (rank + 1) * share)
        self.up = nn.Parameter(self.up.detach()[mine].clone())
        self.down = nn.Parameter(self.down.detach()[mine].clone())
        self.group = mesh.get_group()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        scores = self.router(tokens).softmax(-1)
        top, chosen = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(1, chosen, top / top.sum(-1, keepdim=True))
        # Every expert has a slot for every token, masked where it was not chosen: exact, and of fixed shape.
        sent = (weights.T > 0).to(x.dtype).unsqueeze(-1) * tokens
        if self.group is not None:
            ranks = dist.get_world_size(self.group)
            sent = (
                Exchange.apply(sent, self.group)
                .unflatten(0, (ranks, -1))
                .transpose(0, 1)
                .flatten(1, 2)
            )
        out = torch.bmm(nn.functional.silu(torch.bmm(sent, self.up)), self.down)
        if self.group is not None:
            back = out.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)
            out = Exchange.apply(back, self.group)
        return (weights.T.unsqueeze(-1) * out).sum(0).view_as(x)


class Layer(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = Attention()
        self.mlp = Experts(experts) if experts else FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Chunk(nn.Module):
    """Part of the model: the first also embeds, the last also has norm and head."""

    def __init__(self, whole: nn.ModuleDict, counts: list[int], index: int) -> None:
        super().__init__()
        first, is_last = sum(counts[:index]), index == len(counts) - 1
        self.embedding = None if index else whole["embedding"]
        self.layers = nn.ModuleList(list(whole["layers"])[first : first + counts[index]])
        self.norm = whole["norm"] if is_last else None
        self.head = whole["head"] if is_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def spread(chunk: Chunk, plan: dict[str, Any], mesh: DeviceMesh) -> list[nn.Parameter]:
    """TP, EP and FSDP2 on one chunk; returns the parameters of its experts, which FSDP leaves alone."""
    experts: list[nn.Parameter] = []
    ep = mesh["ep"]
    for layer in chunk.layers:
        if plan["tp"] > 1:
            split = {f"attention.w{name}": ColwiseParallel() for name in "qkv"}
            split |= {"attention.wo": RowwiseParallel()}
            if not plan["experts"]:
                split |= {
                    "mlp.w1": ColwiseParallel(),
                    "mlp.w3": ColwiseParallel(),
                    "mlp.w2": RowwiseParallel(),
                }
            parallelize_module(layer, mesh["tp"], split)
        if plan["experts"] and plan["ep"] > 1:
            layer.mlp.keep(ep)
            experts += [layer.mlp.up, layer.mlp.down]
    if plan["dp"] > 1:
        data = mesh["edp", "ep"]._flatten("dp") if "dp" not in _flat else _flat["dp"]
        _flat["dp"] = data
        for layer in chunk.layers:
            fully_shard(
                layer,
                mesh=data,
                reshard_after_forward=plan["zero_stage"] == 3,
                ignored_params=set(experts),
            )
        fully_shard(chunk, mesh=data, reshard_after_forward=False, ignored_params=set(experts))
    return experts


_flat: dict[str, DeviceMesh] = {}


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = sum(map(sum, plan["stages"]))
    whole = nn.ModuleDict(
        {
            "embedding": nn.Embedding(VOCAB, HIDDEN),
            "layers": nn.ModuleList([Layer(plan["experts"]) for _ in range(layers)]),
            "norm": nn.RMSNorm(HIDDEN),
            "head": nn.Linear(HIDDEN, VOCAB, bias=False),
        }
    )
    batch = plan["dp"] * plan["micro_batch"] * plan["num_micro_batches"]
    data = torch.randint(0, VOCAB, (1, batch, SEQ + 1)).expand(STEPS, -1, -1)
    if world == 1:
        sys.stdout.write(json.dumps({"losses": alone(whole, data, layers)}) + "\n")
        return
    dist.init_process_group("gloo")
    dp, ep = plan["dp"], plan["ep"]
    mesh = init_device_mesh(
        "cpu", (plan["pp"], dp // ep, ep, plan["tp"]), mesh_dim_names=("pp", "edp", "ep", "tp")
    )
    losses = together(whole, data, plan, mesh)
    axes = {axis: dist.get_process_group_ranks(mesh[axis].get_group()) for axis in ("pp", "tp")}
    axes["ep"] = dist.get_process_group_ranks(mesh["ep"].get_group())
    gathered: list[Any] = [None] * world
    place = [int(os.environ["NODE"]), int(os.environ["LOCAL_RANK"])]
    dist.all_gather_object(gathered, {"losses": losses, "axes": axes, "place": place})
    if rank == 0:
        sys.stdout.write(json.dumps({"ranks": gathered}) + "\n")
    dist.barrier()
    sys.stdout.flush()
    # gloo's threads now and then abort a process that is torn down, after all has been said.
    os._exit(0)


def alone(whole: nn.ModuleDict, data: torch.Tensor, layers: int) -> list[float]:
    model = Chunk(whole, [layers], 0)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for tokens in data:
        optimizer.zero_grad()
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def together(
    whole: nn.ModuleDict,
    data: torch.Tensor,
    plan: dict[str, Any],
    mesh: DeviceMesh,
) -> list[float]:
    """Losses of this rank's last chunk per step, averaged over micro-batches; empty on other ranks."""
    counts = [row[chunk] for chunk in range(plan["vpp"]) for row in plan["stages"]]
    stage = mesh["pp"].get_local_rank()
    replica = mesh["edp"].get_local_rank() * plan["ep"] + mesh["ep"].get_local_rank()
    mine = list(range(stage, len(counts), plan["pp"]))
    chunks = [Chunk(whole, counts, i) for i in mine]
    experts = [p for chunk in chunks for p in spread(chunk, plan, mesh)]
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    optimizers = [torch.optim.SGD([p], lr=0.5, foreach=False) for p in parameters]
    size, steps = plan["micro_batch"] * plan["num_micro_batches"], plan["num_micro_batches"]
    run = _pipeline(chunks, mine, len(counts), plan, mesh) if plan["pp"] > 1 else None
    losses = []
    for tokens in data[:, replica * size : (replica + 1) * size]:
        for optimizer in optimizers:
            optimizer.zero_grad()
        found: list[torch.Tensor] = []
        if run is None:
            for part in tokens.chunk(steps):
                loss = loss_of(chunks[0](part[:, :-1]), part[:, 1:]) / steps
                loss.backward()
                found.append(loss.detach() * steps)
        else:
            inputs = [tokens[:, :-1]] if mine[0] == 0 else []
            last, labels = mine[-1] == len(counts) - 1, tokens[:, 1:]
            outputs = {"target": labels, "losses": found} if last else {}
            run.step(*inputs, **outputs)
        for parameter in experts:
            # These experts have seen the tokens of their ep group; the rest of the sum is in edp.
            dist.all_reduce(parameter.grad, group=mesh["edp"].get_group())
            parameter.grad /= plan["dp"]
        for optimizer in optimizers:
            optimizer.step()
        if found:
            losses.append(float(torch.stack([f.detach() for f in found]).mean()))
    return losses


def _pipeline(
    chunks: list[Chunk], mine: list[int], total: int, plan: dict[str, Any], mesh: DeviceMesh
) -> Any:
    group = mesh["pp"].get_group()
    stages = [
        PipelineStage(chunk, index, total, torch.device("cpu"), group=group)
        for chunk, index in zip(chunks, mine, strict=True)
    ]
    if plan["vpp"] > 1:
        return ScheduleInterleaved1F1B(stages, plan["num_micro_batches"], loss_fn=loss_of)
    return Schedule1F1B(stages[0], plan["num_micro_batches"], loss_fn=loss_of)


if __name__ == "__main__":
    main()
