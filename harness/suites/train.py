"""Suite `train`: one whole optimizer step of a model, eager / compile x bf16 / FP8, and what it takes.

Timed are the forward and backward passes of all microbatches, clipping, the optimizer and the FP8 scales, on batches
that lie on the device. Only one arm holds memory at a time (`harness.training.timed`), so each peak is its own.

    bf16_MODE            the control: no FP8, everything else alike, in the case's `compute` (which may be fp32)
    RECIPE_MODE          fp8core's layers
    bf16_fused_eager     the control with fp8core's fused RMSNorm and SwiGLU (models that have them)
    RECIPE_fused_eager   both, the norms and activations handing amaxes or codes to the layers
    bf16_graph, RECIPE_graph   the eager step recorded as one CUDA graph and replayed (`harness.training.cuda_graph`)
    torchao_RECIPE_MODE  torchao's layers in the same places; nocompile_...
                         its prototype for eager mode, torchaomx_... for MXFP8, te_... Transformer Engine's

With `ranks` above 1 the model is sharded by FSDP2 over so many processes, GPU i for rank i, and their steps are timed by the
same engine (`harness.training.parallel.ranked`): `batch` is a rank's, tokens/s are those of all, a step is the slowest rank's;
compiled is each block by itself.

With `convert: advised` the arms of a recipe convert only the layers that `harness.advise` would convert for them on the GPU
here, in their mode and at their tokens; where nothing pays the arm is its control, by the same proof. `ceilings` names a run
of sweep=ceilings to take the rates from. `resolved.advice` has what was advised, why, and by which rates.

Before an arm is timed its first step must agree with the control's and its precision is proved
(`harness.training.steps`). With `batch: max` each arm takes the largest power of two that fits it; tokens a step then
differ between arms, so that only tokens a second compare.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from fp8core.distributed.weight_gather import recipe_reason
from fp8core.recipe import RECIPES
from harness.advise import training as advice
from harness.machine import ranks
from harness.peers import PEERS
from harness.store.case import Arm
from harness.store.errors import MemoryShortageError, UsageError, unknown
from harness.suites import axes_of
from harness.suites.common import (
    compile_missing,
    crossed_points,
    peer_missing,
    ranks_of,
    recipe_unsupported,
)
from harness.suites.extended import extended_table
from harness.timing.device_memory import free_bytes
from harness.timing.workload import ArmInfo, Unsupported, Workload
from harness.training import batches, cuda_graph, meta_estimate
from harness.training.data import CORPORA
from harness.training.models import ModelSpec, resolve
from harness.training.parallel.ranked import RankedArm
from harness.training.setup import EXPERTS, Setup
from harness.training.step import CHECKPOINTING, COMPUTE
from harness.training.timed import Profile, Source, TimedArm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.store.case import Case

ALONE = True  # see harness.timing.workload.runs_alone
MAX = "max"
ADVISED = "advised"
MODES = ("eager", "compile")
FUSED = "fused"  # casts of an arm whose norms and activations are fused too
GRAPH = "graph"  # mode of an arm whose eager step is recorded once and replayed
MODEL_PEERS = (
    "torchao",
    "torchao_nocompile",
    "torchao_mx",
    "transformer_engine",
)  # whose layers take activations of any shape, and biases

AXES = axes_of("train", compute=COMPUTE, checkpointing=CHECKPOINTING, experts=EXPERTS)


def _arms() -> dict[str, ArmInfo]:
    arms = {
        Arm("bf16", "eager"): ArmInfo("the model without FP8"),
        Arm("bf16", "compile"): ArmInfo("the model without FP8 under torch.compile", "bf16_eager"),
        Arm("bf16", "eager", FUSED): ArmInfo("the model without FP8, RMSNorm and SwiGLU fused", "bf16_eager"),
        Arm("bf16", GRAPH): ArmInfo(
            "the model without FP8, its eager step replayed as a CUDA graph", "bf16_eager"
        ),
    }
    for name in RECIPES:
        for mode in (*MODES, GRAPH):
            arms[Arm(name, mode)] = ArmInfo(f"recipe {name}, {mode}", f"bf16_{mode}", name)
        arms[Arm(name, "eager", FUSED)] = ArmInfo(
            f"recipe {name}, RMSNorm and SwiGLU fused", str(Arm("bf16", "eager", FUSED)), name
        )
    for owner, peer in ((owner, PEERS[owner]) for owner in MODEL_PEERS):
        for name in peer.recipes:
            for mode in peer.modes:
                about = f"{peer.doc}, recipe {name}, {mode}"
                arms[Arm(name, mode, peer=peer.arm)] = ArmInfo(about, f"bf16_{mode}", name, owner)
    return extended_table(arms, RECIPES)


ARMS: Mapping[str, ArmInfo] = _arms()


def _check(case: Case) -> None:
    """Everything about a case that can be refused without building its model."""
    if case["data"] not in CORPORA:
        raise unknown("data", str(case["data"]), CORPORA)
    of_text = case.text("model"), case.text("data"), case.text("data_path")
    batch = 1 if case["batch"] == MAX else case.integer("batch")
    batches.check(*of_text, case.integer("seq"), case.integer("layers"), batch)
    if dict(case.axes).get("fp8_all_gather") and ranks_of(case) == 1:
        raise UsageError("fp8_all_gather=true: one process gathers nothing; add axes.ranks=2 or leave it out")
    first, last = case.integer("profile_start"), case.integer("profile_end")
    if last < first:
        raise UsageError(f"profile_end={last} lies before profile_start={first}")
    if _option(case, "ceilings") and not _advised(case):
        raise UsageError(
            f"ceilings={_option(case, 'ceilings')} is read with axes.convert={ADVISED} alone; add it or leave ceilings out"
        )


points = crossed_points("train", "whole models by axes.model", AXES, check=_check)


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """The peer, a compiler, kernels and tokens of the recipe, rates to advise by, or memory that is predicted to lack."""
    owner = ARMS[arm].peer
    if owner and _option(case, "experts") == "fp8":
        return Unsupported("shape", f"peer {owner!r} has layers for nn.Linear, none for experts")
    setup = _setup(case, arm, 1 if case["batch"] == MAX else case.integer("batch"))
    if setup.graph and (refusal := cuda_graph.refused(device, setup.experts)):
        return Unsupported("device", refusal)
    if setup.peer:
        peer, autocast = PEERS[setup.peer], setup.compute == "bf16_autocast"
        if absent := peer_missing(peer, device):
            return absent
        reason = None
        if setup.recipe is not None:
            reason = peer.unfit(setup.recipe.name, device)
            if reason is None and autocast:
                reason = peer.fails_under_autocast(setup.recipe.name)
        if reason:
            return Unsupported("device", reason)
    if (world := ranks_of(case)) > 1 and (why := _not_on_ranks(case, setup, world, device)):
        return why
    why = compile_missing(device, setup.recipe) if setup.compiled else None
    # Who brings a model knows its tokens; a layer that can't take them says so.
    tokens = setup.batch * setup.seq if isinstance(resolve(setup.model), ModelSpec) else 0
    why = why or recipe_unsupported(setup.recipe, tokens, device)
    if why is not None:
        return why
    if case["batch"] == MAX and torch.device(device).type != "cuda":
        return Unsupported("device", f"batch={MAX} is determined on a GPU; give a number")
    if setup.recipe is not None and _advised(case):
        why = _no_advice(case, setup, device)
        if why is not None:
            return why
        setup, _ = _narrowed(case, setup, device)
    if ranks_of(case) > 1:  # what a rank takes of a sharded model shows when it is made
        return None
    return meta_estimate.unsupported(setup, device, free_bytes(device))


def _not_on_ranks(case: Case, setup: Setup, world: int, device: str) -> Unsupported | None:
    """Why an arm is not timed over ranks."""
    if missing := ranks.gpus_missing(world, device):
        return Unsupported("device", missing)
    plain = not (setup.peer or setup.graph or setup.fused_modules)
    wanted = {
        "arms": plain or "take bf16 and RECIPE, eager or compile",
        "batch": case["batch"] != MAX or "give a number",
        "experts": setup.experts == "hp" or "leave experts=hp",
        "convert": not _advised(case) or "take axes.convert=all",
        "profile": not case["profile"] or "leave train.profile=false",
    }
    for what, way in wanted.items():
        if way is not True:
            return Unsupported("shape", f"ranks={world}: these {what} are not timed over ranks; {way}")
    if setup.recipe is not None and setup.recipe.fp8_all_gather and (why_not := recipe_reason(setup.recipe)):
        return Unsupported("shape", f"fp8_all_gather=true: {why_not}; take axes.fp8_all_gather=false")
    return None


_LEAST_STEPS = 4  # of an arm: the first one, one of the proof, one that warms up, one that is timed


def least_seconds(case: Case, arms: Sequence[str], flops_per_s: float) -> float:
    """Seconds of the products of the steps that the arms take at the least; 0 where a batch is still to be found."""
    if case["batch"] == MAX:
        return 0.0
    flops = sum(meta_estimate.flops(_setup(case, arms[0], case.integer("batch"))).values())
    return len(arms) * _LEAST_STEPS * flops / flops_per_s


def work(case: Case) -> float:
    """Tokens of a step."""
    batch = 1 if case["batch"] == MAX else case.integer("batch")
    return float(batch * case.integer("seq") * case.integer("accumulation") * ranks_of(case))


def build(case: Case, arm: str, device: str) -> Workload:
    """The arm, its memory given up again; with `batch: max` after the largest one was found."""
    if (world := ranks_of(case)) > 1:
        setup, source = _setup(case, arm, case.integer("batch")), _source(case)
        return RankedArm(setup, source, device, world, advice.predicted(setup, world, device)).workload()
    if case["batch"] == MAX:
        return largest(case, arm, device).workload()
    return _timed(case, arm, case.integer("batch"), device).workload()


def largest(case: Case, arm: str, device: str) -> TimedArm:
    """The arm with the largest batch, a power of two, that runs two steps: tried, not only predicted.

    Raises:
        MemoryShortageError: not even one sequence fits.
    """
    room, batch = free_bytes(device), 1
    # The first to be tried is predicted not to fit: the prediction is of eager code, and compiled code may need less.
    while (
        meta_estimate.total(
            meta_estimate.memory(_narrowed(case, _setup(case, arm, batch), device)[0], device)
        )
        <= room
    ):
        batch *= 2
    while True:
        try:
            tried = _timed(case, arm, batch, device)
            with tried.resident():
                tried.stepper.run()
                tried.stepper.run()
        except MemoryShortageError:
            if batch == 1:
                raise
        else:
            tried.recompile()  # the executor times the compilation
            return tried
        batch //= 2
        gc.collect()


def _timed(case: Case, arm: str, batch: int, device: str) -> TimedArm:
    profile = None
    if case["profile"]:
        file = f"_trace-{case.case_id}-{arm}.json.gz"
        profile = Profile(case.integer("profile_start"), case.integer("profile_end"), file)
    source = _source(case)
    setup, facts = _narrowed(case, _setup(case, arm, batch), device)
    timed = TimedArm(setup, source, device, profile)
    timed.resolved |= facts
    return timed


def _source(case: Case) -> Source:
    return Source(case.text("data"), case.text("data_path"), case.seed)


def _option(case: Case, axis: str) -> str:
    """The value of an axis that a case may leave open; "" where it does."""
    return str(dict(case.axes).get(axis, ""))


def _advised(case: Case) -> bool:
    return _option(case, "convert") == ADVISED


def _no_advice(case: Case, setup: Setup, device: str) -> Unsupported | None:
    if setup.compute == "fp32":
        return Unsupported(
            "shape", f"convert={ADVISED} weighs FP8 against bf16; with compute=fp32 take axes.convert=all"
        )
    if setup.experts != "hp":
        return Unsupported("shape", f"convert={ADVISED} judges Linear layers; with it leave experts=hp")
    if setup.graph:
        return Unsupported(
            "shape", f"convert={ADVISED} knows eager and compiled steps, no recorded ones; take RECIPE_eager"
        )
    found = advice.machine_here(device, _option(case, "ceilings"))
    return Unsupported("device", found) if isinstance(found, str) else None


def _narrowed(case: Case, setup: Setup, device: str) -> tuple[Setup, Mapping[str, object]]:
    """With `convert: advised` the set-up of the layers that pay, and a remark on them; else as it is."""
    if setup.recipe is None or not _advised(case):
        return setup, {}
    machine = advice.machine_here(device, _option(case, "ceilings"))
    if isinstance(machine, str):  # `unsupported` says so before anything is built
        raise UsageError(machine)
    found = advice.advised(setup, machine)
    return found.setup, found.facts


def _setup(case: Case, arm: str, batch: int) -> Setup:
    info = ARMS[arm]
    mode, recipe = info.arm.mode, RECIPES[info.recipe] if info.recipe else None
    if recipe is not None and dict(case.axes).get("fp8_all_gather"):
        recipe = recipe.with_fp8_all_gather()
    return batches.setup_of(
        case,
        batch=batch,
        recipe=recipe,
        peer=info.peer,
        experts=(_option(case, "experts") or "hp") if recipe is not None else "hp",
        fused_modules=info.arm.casts == FUSED,
        compiled=mode == "compile",
        graph=mode == GRAPH,
        seed=case.seed,
    )
