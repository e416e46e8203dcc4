"""A small file of each format, as its program writes it. Oracle: the figures that were put into the text."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.store.curve_files import read, read_all, tidy
from harness.store.curve_logs import FORMATS, read_log
from harness.store.errors import UsageError

NAN = math.nan


@dataclass(frozen=True)
class File:
    """A file, and what is read from it: the losses by step, by default of validation."""

    name: str
    content: str | bytes
    steps: Sequence[float]
    values: Sequence[float]
    column: str = "val_loss"
    last: float | None = None  # None: the last of `steps`
    seconds: Sequence[float] | None = None
    notes: Sequence[str] = ()
    unfinished: str = ""
    format: str = ""
    asked: str = ""
    also: dict[str, Any] = field(default_factory=dict)  # cells of the first row


def mllog(key: str, value: object, second: float = 0, kind: str = "POINT_IN_TIME", **metadata: object) -> str:
    event = {
        "namespace": "",
        "time_ms": 1_760_000_000_000 + int(1000 * second),
        "event_type": kind,
        "key": key,
    }
    return ":::MLLOG " + json.dumps(
        event | {"value": value, "metadata": {"file": "a.py", "lineno": 1, **metadata}}
    )


def mlperf(seed: int, start: float = 0, status: str = "success") -> list[str]:
    lines = [
        mllog("init_start", None, start, "INTERVAL_START"),
        mllog("submission_benchmark", "llama31_8b", start),
        mllog("submission_org", "ACME", start),
        mllog("submission_platform", "8xGPU", start),
        mllog("seed", seed, start),
        mllog("global_batch_size", 32, start),
        mllog("opt_base_learning_rate", 4e-4, start),
        mllog("run_start", None, start + 10, "INTERVAL_START"),
        mllog(
            "tracked_stats",
            {"reduced_train_loss": 5.5, "train_step_time": 0.5},
            start + 12,
            samples_count=32,
            step=1,
        ),
        mllog("eval_accuracy", 4.5 + seed / 100, start + 14, samples_count=64),
        mllog("eval_accuracy", 3.25 + seed / 100, start + 20, samples_count=128),
    ]
    return [*lines, mllog("run_stop", None, start + 21, "INTERVAL_END", status=status)] if status else lines


def megatron(step: int, loss: str, more: str = "") -> str:
    printed = f"lm loss: {loss} | " if loss else ""
    return (
        f" iteration {step:8d}/     300 | consumed samples: {step * 256:12d} | elapsed time per iteration (ms): 612.5 | "
        f"learning rate: 1.500000E-04 | global batch size:   256 | {printed}loss scale: 1.0 | grad norm: 0.513 | "
        f"number of skipped iterations:   0 | number of nan iterations:   0 |{more}"
    )


def titan(second: int, what: str) -> str:
    return f"[titan] 2025-11-30 12:00:{second:02},123 - root - INFO - {what}"


MEGATRON = (
    "using world size: 8\n"
    f"{megatron(100, '3.100000E+00')}\n validation loss at iteration 100 | lm loss value: 3.200000E+00 | lm loss PPL: 2.453253E+01 |\n"
    f"{megatron(200, '2.100000E+00')}\n validation loss at iteration 200 | lm loss value: 2.200000E+00 | lm loss PPL: 9.025013E+00 |\n"
    f"{megatron(300, '')}\n"
)
NANOCHAT = (
    "Step 00000 | Validation bpb: 3.2500\n"
    "step 00000/00003 (0.00%) | loss: 9.500000 | grad norm: 1.2000 | lrm: 1.00 | dt: 500.00ms | tok/sec: 1,234 | mfu: 12.3 | total time: 0.10m\n"
    "step 00001/00003 (33.33%) | loss: 8.500000 | grad norm: 1.1000 | lrm: 1.00 | dt: 500.00ms | tok/sec: 1,234 | mfu: 12.3 | total time: 0.20m\n"
    "step 00002/00003 (66.67%) | loss: 7.500000 | grad norm: nan | lrm: 1.00 | dt: 500.00ms | tok/sec: 1,234 | mfu: 12.3 | total time: 0.30m\n"
    "Step 00003 | Validation bpb: 1.0125\nMinimum validation bpb: 1.0125\n"
)
NANOGPT = (
    "number of parameters: 10.65M\nstep 0: train loss 4.2500, val loss 4.5000\niter 0: loss 4.2750, time 12345.67ms, mfu -100.00%\n"
    "iter 10: loss 3.2500, time 12.30ms, mfu 1.20%\nstep 250: train loss 1.9600, val loss 2.0600\n"
)
LLMC = (
    "| weight init method    | d12 |\nval loss 11.000000\n"
    "step    1/2 | loss 10.500000 (+nanz)| norm 15.2500 (+nanz)| lr 1.00e-06 | 123.45 ms | 50.0% bf16 MFU | 123456 tok/s\n"
    "step    2/2 | loss 9.500000 (+0.10z)| norm 14.2500 (-1.20z)| lr 2.00e-06 | 123.45 ms | 50.0% bf16 MFU | 123456 tok/s\n"
    "val loss 9.250000\n"
)
MODDED = (
    "step:0/20 val_loss:10.8250 train_time:0ms step_avg:nanms\nstep:10/20 train_time:1500ms step_avg:150.00ms\n"
    "step:20/20 val_loss:3.2750 train_time:3000ms step_avg:150.00ms\npeak memory allocated: 100 MiB\n"
)
HISTORY = [
    {"epoch": 0.1, "grad_norm": 1.5, "learning_rate": 1e-4, "loss": 3.5, "step": 10},
    {"epoch": 0.1, "eval_loss": 3.25, "eval_runtime": 1.5, "step": 10},
    {"epoch": 0.2, "grad_norm": NAN, "learning_rate": 1e-4, "loss": 0.0, "step": 20},
    {"epoch": 0.2, "eval_loss": NAN, "step": 20},
    {"epoch": 0.2, "step": 20, "total_flos": 1.0, "train_loss": 1.75, "train_runtime": 9.5},
]
STATE = json.dumps({"global_step": 20, "max_steps": 20, "log_history": HISTORY})
FACTORY = [
    {
        "current_steps": 10,
        "total_steps": 20,
        "loss": 3.5,
        "lr": 1e-5,
        "percentage": 50.0,
        "elapsed_time": "0:01:02",
    },
    {
        "current_steps": 20,
        "total_steps": 20,
        "loss": 2.5,
        "lr": 1e-5,
        "percentage": 100.0,
        "elapsed_time": "1 day, 1:00:02",
    },
]
FILES: dict[str, File] = {
    "mllog": File("result_0.txt", "\n".join(mlperf(7)), [64, 128], [4.57, 3.32], "eval_loss", seconds=[4, 10],
        notes=["read as mllog", "samples_count"], also={"seed": 7, "benchmark": "llama31_8b", "submitter": "ACME", "system": "8xGPU", "opt_base_learning_rate": 4e-4}),
    "mllog, training loss": File("result_0.txt", "\n".join(mlperf(7)), [32], [5.5], "train_loss", 128, asked="train_loss"),
    "mllog, ranks, precision": File("a.log", "\n".join(["    fp8: hybrid", "0: fp4: e2m1", "  fp8_recipe: tensorwise", "  fp8_dot_product_attention: true", *(f"{rank}: {line}" for line in mlperf(7) for rank in (0, 1))]),
        [64, 128], [4.57, 3.32], "eval_loss", notes=["fp8=hybrid (line 1)", "fp4=e2m1 (line 2)"], also={"fp8": "hybrid", "fp4": "e2m1", "fp8_recipe": "tensorwise", "fp8_dot_product_attention": "true"}),
    "mllog, aborted": File("a.log", "\n".join(mlperf(7, status="aborted")), [64, 128], [4.57, 3.32], "eval_loss", unfinished="aborted"),
    "mllog, cut": File("a.log", "\n".join([*mlperf(7, status=""), ':::MLLOG {"namespace": "", "time_']), [64, 128], [4.57, 3.32], "eval_loss", unfinished="no run_stop", notes=["line 12"]),
    "mllog, older": File("a.log", "\n".join([mllog("run_start", None), mllog("eval_accuracy", 2.5, 5, epoch_num=1024), mllog("run_stop", None, 6, status="success")]), [1024], [2.5], "eval_loss", notes=["epoch_num"]),
    "megatron": File("slurm-1.out", MEGATRON, [100, 200], [3.2, 2.2], last=300, notes=["read as megatron"], also={"val_ppl": "2.453253E+01"}),
    "megatron, training loss": File("a.log", MEGATRON, [100, 200], [3.1, 2.1], "train_loss", 300, asked="train_loss", also={"lr": "1.500000E-04", "grad_norm": "0.513", "skipped": "0", "nan": "0"}),
    "megatron, dated and stopped": File("a.log", "  fp8 ............................................. hybrid\n[2025-10-21 16:18:53]" + megatron(100, "3.1E+00") + "\n[2025-10-21 16:20:53]" + megatron(200, "nan"),
        [100, 200], [3.1, NAN], "train_loss", seconds=[0, 120], unfinished="step 200 of 300", also={"fp8": "hybrid"}),
    "megatron, other losses": File("a.log", megatron(300, "3.1E+00", " mtp_1 loss: 4.1E+00 |") + "\n validation loss at iteration 300 on test set | lm loss value: 2.2E+00 |\n", [300], [3.1], "train_loss", notes=["not read: line 2"], also={"mtp_1_loss": "4.1E+00"}),
    "torchtitan": File("a.log", "\n".join([titan(1, "step:  1  loss: 12.2500  grad_norm:  1.5000  memory:  1.00GiB(1.25%)  tps: 1,234"), titan(3, "step: 10  loss: 11.2500  grad_norm:  1.2500  memory:  1.00GiB(1.25%)  tps: 11,234")]),
        [1, 10], [12.25, 11.25], "train_loss", seconds=[0, 2], also={"tps": "1,234"}),
    "torchtitan, coloured": File("a.log", titan(1, "\x1b[31mstep: 10  \x1b[32mloss:  8.1250  \x1b[38;5;208mgrad_norm:  1.5000  \x1b[35mtps: 1\x1b[39m\n") + titan(2, "\x1b[33mvalidate step: 10  \x1b[32mloss:  7.1250  \x1b[35mtps: 1\x1b[39m\n"), [10], [7.125]),
    "torchtune": File("log_1700.txt", "Step 1 | loss:1.25 lr:2e-05 tokens_per_second_per_gpu:800.5 \nStep 2 | loss:nan lr:2e-05 tokens_per_second_per_gpu:801.5 \n", [1, 2], [1.25, NAN], "train_loss"),
    "nanochat": File("base.log", NANOCHAT, [0, 3], [3.25, 1.0125], "val_bpb"),
    "nanochat, training loss": File("base.log", NANOCHAT, [0, 1, 2], [9.5, 8.5, 7.5], "train_loss", 3, [6, 12, 18], asked="train_loss", also={"grad_norm": "1.2000", "dt_s": "0.5"}),
    "nanochat, one line": File("a.log", "\rstep 00000 (0.0%) | loss: 9.5 | lrm: 1.00 | dt: 5ms\rstep 00001 (50.0%) | loss: 8.5 | lrm: 1.00 | dt: 5ms", [0, 1], [9.5, 8.5], "train_loss"),
    "nanogpt": File("out.txt", NANOGPT, [0, 250], [4.5, 2.06], also={"train_loss": "4.2500"}),
    "nanogpt, batch losses": File("out", NANOGPT, [0, 10], [4.275, 3.25], "loss", 250, asked="loss", also={"dt_s": "12.34567"}),
    "llmc": File("log", LLMC, [0, 2], [11.0, 9.25]),
    "llmc, training loss": File("log", LLMC, [1, 2], [10.5, 9.5], "train_loss", asked="train_loss", also={"grad_norm": "15.2500", "lr": "1.00e-06"}),
    "llmc, main.log": File("main.log", "s:0 tel:11.0000\ns:0 trl:11.1000 lr:0.000001 norm:15.25\ns:1 trl:11.0000 lr:0.000002 norm:15.25\ns:250 eval:0.2500\ns:250 tel:4.5000\n", [0, 250], [11, 4.5]),
    "modded_nanogpt": File("a.txt", MODDED, [0, 20], [10.825, 3.275], seconds=[0, 3]),
    "modded_nanogpt, seconds": File("a.txt", "step:0/20 val_loss:10.82500 train_time:0.000s step_avg:nanms\nstep:20/20 val_loss:3.27500 train_time:3.250s step_avg:150.00ms\n", [0, 20], [10.825, 3.275], seconds=[0, 3.25]),
    "modded_nanogpt, decimals": File("a.txt", "step:20/20 val_loss:3.275 val_bpb:1.0 train_time:3250.75ms step_avg:150.00ms\n", [20], [3.275], seconds=[3.25075], also={"val_bpb": "1.0"}),
    "modded_nanogpt, older": File("a.log", "step:1/20 train_loss:10.5 train_time:5ms step_avg:5ms\nstep:2/20 train_loss:deferred train_time:9ms step_avg:4ms\nstep:20/20 train_loss:4.5 train_time:99ms step_avg:4ms\n", [1, 20], [10.5, 4.5], "train_loss"),
    "modded_nanogpt, cut": File("a.txt", MODDED.partition("\npeak")[0].partition(" train_time:3000")[0], [0], [10.825], last=20, unfinished="line 3 is cut"),
    "modded_nanogpt, stopped": File("a.txt", MODDED.replace("/20", "/900"), [0, 20], [10.825, 3.275], unfinished="step 20 of 900"),
    "mlflow": File("mlruns/1/ab/metrics/val_loss", "1760000000000 4.5 0\n1760000001500 3.5 10\n", [0, 10], [4.5, 3.5], "value", seconds=[0, 1.5]),
    "a regular expression": File("a.log", "it 5 | loss=2.5\nit 6 | loss=2.25", [5, 6], [2.5, 2.25], "value", format=r"it (?P<step>\d+) \| loss=(?P<value>\S+)"),
    "trainer_state.json": File("trainer_state.json", STATE, [10, 20], [3.25, NAN], "eval_loss", notes=["read as NaN: step 20"]),
    "trainer_state.json, training loss": File("trainer_state.json", STATE, [10, 20], [3.5, NAN], "loss", asked="loss", also={"grad_norm": 1.5}),
    "trainer_state.json, stopped": File("trainer_state.json", json.dumps({"global_step": 10, "max_steps": 20, "log_history": [*HISTORY[:1], HISTORY[-1]]}), [10], [3.5], "loss", 20, unfinished="step 10 of 20"),
    "LLaMA-Factory": File("trainer_log.jsonl", "\n".join(map(json.dumps, FACTORY)) + "\n", [10, 20], [3.5, 2.5], "loss", seconds=[62, 90002]),
    "LLaMA-Factory, stopped": File("trainer_log.jsonl", json.dumps(FACTORY[0]) + "\n", [10], [3.5], "loss", unfinished="step 10 of 20"),
    "JSONL, cut": File("a.jsonl", '{"step": 0, "val_loss": 4, "lr": 1}\n{"step": 10, "val_loss": 3, "lr": 1}\n{"step": 20, "val_lo', [0, 10], [4, 3], last=20, unfinished="line 3 is cut"),
    "Lightning": File("metrics.csv", "epoch,step,train_loss,val_loss\n0,9,3.5,\n0,9,,3.25\n1,19,2.5,\n1,19,,2.25\n1,24,1.5,\n", [9, 19], [3.25, 2.25], last=24),
    "Lightning, training loss": File("metrics.csv", "epoch,step,train_loss,val_loss\n0,9,3.5,\n0,9,,3.25\n1,19,2.5,\n", [9, 19], [3.5, 2.5], "train_loss", asked="train_loss"),
    "Keras": File("a.csv", "epoch,loss,val_loss\n0,3.5,3.25\n1,2.5,2.25\n", [0, 1], [3.25, 2.25]),
    "a loss alone": File("a.csv", "step,loss,seconds\n1,3.5,0.5\n2,-0.5,1\n", [1, 2], [3.5, -0.5], "loss", seconds=[0.5, 1]),
    "W&B, tokens": File("a.csv", '"tokens","a - eval/loss","a - eval/loss__MIN","a - eval/loss__MAX"\n"100","3.5","3.5","3.5"\n"200","2.5","2.5","2.5"\n', [100, 200], [3.5, 2.5], "eval/loss"),
    "W&B, a group": File("a.csv", '"Step","kind: fp8 - val_loss","kind: fp8 - val_loss__MIN","kind: fp8 - val_loss__MAX"\n1,3.5,3.25,3.75\n', [1], [3.5], notes=["kind: fp8 is a mean"]),
    "W&B, JSON history": File("a.jsonl", '{"_step": 1, "_timestamp": 1760000000.5, "val/loss": 3.5}\n{"_step": 2, "_timestamp": 1760000002.0, "val/loss": NaN}\n', [1, 2], [3.5, NAN], "val/loss", seconds=[0, 1.5]),
    "TensorBoard, CSV": File("run-.csv", "Wall time,Step,Value\n1760000000.5,0,4.5\n1760000002.5,10,3.5\n", [0, 10], [4.5, 3.5], "Value", seconds=[0, 2]),
    "TensorBoard, JSON": File("run-.json", "[[1760000000.5, 0, 4.5], [1760000002.5, 10, 3.5]]", [0, 10], [4.5, 3.5], "value", seconds=[0, 2]),
    "MLflow, JSON": File("a.json", json.dumps({"metrics": [{"key": k, "value": v, "timestamp": 1_760_000_000_000 + 1500 * i, "step": 10 * i} for i in (0, 1) for k, v in (("val_loss", 4 - i), ("lr", 0.1))]}), [0, 10], [4, 3], seconds=[0, 1.5]),
    "MLflow, CSV": File("a.csv", "run,key,step,timestamp,value\nr,val_loss,0,1760000000000,4.5\nr,val_loss,10,1760000001500,3.5\n", [0, 10], [4.5, 3.5], seconds=[0, 1.5]),
    "dates": File("a.csv", "step,val_loss,timestamp\n0,4.5,2025-10-21T16:18:53\n1,3.5,2025-10-21T16:19:53\n", [0, 1], [4.5, 3.5], seconds=[0, 60]),
    "UTF-16": File("a.log", NANOGPT.encode("utf-16"), [0, 250], [4.5, 2.06]),
    "a byte order mark": File("a.csv", "step,val_loss\n0,4.5\n".encode("utf-8-sig"), [0], [4.5]),
    "a byte that is no text": File("a.log", NANOGPT.encode() + b"\xe2\x96", [0, 250], [4.5, 2.06]),
    "a restart": File("a.csv", "step,val_loss\n100,5\n200,4\n300,3.5\n400,3.25\n300,3.75\n350,3\n500,2\n", [100, 200, 300, 350, 500], [5, 4, 3.75, 3, 2], notes=["step 300 to 400 written twice, the later rows count"]),
    "a restart that met the same losses": File("a.csv", "step,val_loss\n100,5\n200,4\n300,3\n200,4\n300,3\n400,2\n", [100, 200, 300, 400], [5, 4, 3, 2]),
    "a restart, one loss alike": File("a.csv", "step,val_loss\n100,5\n200,4\n300,3\n200,4.5\n300,3\n", [100, 200, 300], [5, 4.5, 3], notes=["step 200 to 200 written twice"]),
    "a restart that has not come so far": File("a.csv", "step,val_loss\n100,5\n200,4\n300,3\n200,4.5\n", [100, 200], [5, 4.5], last=300, unfinished="ends before step 300", notes=["step 200 to 300"]),
    "ranks that lag": File("a.log", "".join(f"s:{s} tel:{v}\n" for s, v in ((10, 5), (20, 4), (10, 5), (30, 3), (20, 4))), [10, 20, 30], [5, 4, 3]),
    "a restart of a log": File("a.txt", "".join(f"step:{s}/40 val_loss:{v} train_time:{t}ms\n" for s, v, t in ((10, 5, 10), (20, 4, 20), (20, 4.5, 5), (40, 3, 15))), [10, 20, 40], [5, 4.5, 3], seconds=[NAN] * 3, notes=["step 20 to 20 written twice", "time_s goes back"]),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_file_is_read_by_its_name_and_its_lines(case: str, tmp_path: Path) -> None:
    file = FILES[case]
    path = tmp_path / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file.content if isinstance(file.content, bytes) else file.content.encode())
    rows = tidy(read(path, file.format), value=file.asked)
    attrs, run = rows.attrs, rows["run"].iloc[0]
    assert attrs["value"] == file.column
    assert rows["step"].tolist() == list(file.steps)
    np.testing.assert_allclose(rows["value"], file.values)
    assert attrs["last"][run] == (file.steps[-1] if file.last is None else file.last)
    if file.seconds is not None:
        np.testing.assert_allclose(rows["time_s"], file.seconds)
    notes = "\n".join(attrs["notes"])
    assert all(note in notes for note in file.notes), notes
    assert all(str(path) in note for note in attrs["notes"])
    assert file.unfinished in attrs["unfinished"].get(run, "")
    assert bool(attrs["unfinished"]) == bool(file.unfinished)
    assert {name: rows[name].iloc[0] for name in file.also} == file.also


def test_every_format_of_the_table_has_a_file() -> None:
    assert {case.partition(",")[0] for case in FILES} >= set(FORMATS)


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def test_runs_of_one_file(tmp_path: Path) -> None:
    log = write(tmp_path / "a.log", "\n".join([*mlperf(1), *mlperf(2, 100, ""), *mlperf(3, 200, "aborted")]))
    idle = [
        mllog("run_start", None, 300),
        mllog("run_stop", None, 301, status="aborted"),
        mllog("tracked_stats", {"x": 1}, 302, step=9),
    ]
    write(log, log.read_text() + "\n" + "\n".join(idle))
    rows = tidy(read(log))
    assert "without an evaluation, not read: 1" in "".join(rows.attrs["notes"])
    assert rows.groupby("run")["step"].apply(list).to_dict() == {run: [64, 128] for run in "123"}
    assert rows["seed"].tolist() == [1, 1, 2, 2, 3, 3]
    assert rows["time_s"].tolist() == [4, 10] * 3
    assert rows.attrs["unfinished"] == {"2": "no run_stop", "3": "aborted"}
    (table,) = read_all([f"{log}:3"], "base")
    assert tidy(table).attrs["unfinished"] == {"3": "aborted"}


def test_runs_of_one_name_in_an_export_stay_apart(tmp_path: Path) -> None:
    head = ",".join(f'"a - val_loss{end}"' for end in ("", "__MIN", "__MAX") * 1)
    path = write(
        tmp_path / "a.csv", f"train/global_step,{head},{head}\n1,4,4,4,5,5,5\n2,3,3,3,,,\n3,,,,4,3,5\n"
    )
    rows = tidy(read(path))
    assert rows.groupby("run")["value"].apply(list).to_dict() == {"a": [4, 3], "a (1)": [5, 4]}
    assert rows.attrs["last"] == {"a": 2, "a (1)": 3}
    assert ["a is a mean" in note for note in rows.attrs["notes"]] == [True]
    assert tidy(read(path), step="train/global_step").attrs["step"] == "train/global_step"


def test_a_folder_of_one_run_is_a_run(tmp_path: Path) -> None:
    for step in (20, 100):
        history = [{"step": s, "eval_loss": 5 - s / 100} for s in range(20, step + 1, 20)]
        state = {"global_step": step, "max_steps": 100, "log_history": history}
        write(tmp_path / "hf" / f"checkpoint-{step}" / "trainer_state.json", json.dumps(state))
    write(tmp_path / "ml" / "meta.yaml", "run_id: ml")
    write(tmp_path / "ml" / "metrics" / "val" / "loss", "1760000000000 4.5 0\n1760000001500 3.5 10\n")
    write(tmp_path / "ml" / "metrics" / "lr", "1760000000000 0.1 0\n1760000009000 0.1 15\n")
    for pattern in (f"{tmp_path}/hf", f"{tmp_path}/hf/*/trainer_state.json"):
        (table,) = read_all([pattern], "base")
        rows = tidy(table)
        assert rows["step"].tolist() == [20, 40, 60, 80, 100]
        assert rows.attrs["source"] == f"{tmp_path}/hf"
        assert "checkpoint-100 is the last of 2" in rows.attrs["notes"][0]
    rows = tidy(read(tmp_path / "ml"))
    assert rows["value"].tolist() == [4.5, 3.5]
    assert rows.attrs["last"] == {str(tmp_path / "ml"): 15}
    assert len(read_all([f"{tmp_path}/*"], "base")) == 2
    for path in (tmp_path, tmp_path / "ml" / "metrics"):
        with pytest.raises(UsageError, match=r"directory.*name its files"):
            read_all([str(path)], "base")
        with pytest.raises(UsageError, match=r"directory.*name its files"):
            read(path)
    write(tmp_path / "a.csv", "step,loss\n1,2\n")
    (table,) = read_all([f"{tmp_path}/*"], "base")
    assert "2 folders are not read" in table.attrs["notes"][-1]


def test_event_files_of_a_resumed_run_are_one_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="its event files are read by the library tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    for part, steps in (("a", (0, 10, 20)), ("b", (10, 20, 30))):
        with SummaryWriter(str(tmp_path / "run"), filename_suffix=part) as writer:
            for step in steps:
                loss = 5 - step / 10 + (part == "b") / 4
                writer.add_scalar("val_loss", loss, step, walltime=1.7e9 + step + 100 * (part == "b"))
            writer.add_text("about", "no figure")
    for pattern in ("run", "run/*", "run/*tfevents*"):
        (table,) = read_all([f"{tmp_path}/{pattern}"], "base")
        rows = tidy(table)
        assert rows["value"].tolist() == [5, 4.25, 3.25, 2.25]
        assert rows["time_s"].tolist() == [0, 110, 120, 130]
        assert "not read: about" in rows.attrs["notes"][0]
        assert "step 10 to 20 written twice" in rows.attrs["notes"][1]


REFUSED: dict[str, tuple[str, str | bytes, str, str]] = {
    "no format": ("a.log", "nothing here\n", "", "no line is of mllog, megatron, .*format=REGEX"),
    "two formats": ("a.log", "step:1/2 val_loss:3\ns:1 tel:4\n", "", "fit llmc and modded_nanogpt alike: give format="),
    "another format": ("a.log", NANOGPT, "megatron", "no line matches format=.*another format"),
    "no event": ("a.log", ":::MLLOG {}\n", "", "no eval_accuracy"),
    "an image": ("a.png", b"\x89PNG\x00\xff\xfe", "", "no line is of"),
    "runs interleaved": ("a.csv", "step,val_loss\n0,4\n0,5\n1,3\n1,4\n2,2\n2,3\n", "", "line 3.*go back 3 times.*file a run"),
    "runs interleaved in a log": ("a.log", "".join(f"s:{s} tel:{s + r}\n" for s in range(50) for r in (0, 7)), "", "go back"),
    "a line of JSON": ("a.jsonl", '{"step": 1}\n{"step"\n{"step": 2}\n', "", "line 2"),
    "a cut line alone": ("a.jsonl", '{"step": 1', "", "line 1"),
    "no loss": ("a.log", "step:1/2 train_time:4ms\n", "", "no single column of val_loss.*value="),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_the_way_out(case: str, tmp_path: Path) -> None:
    name, content, format, said = REFUSED[case]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=rf"(?s){name}.*{said}") as error:
        tidy(read(path, format))
    assert str(error.value).isprintable()


def test_lines_of_another_format_are_told(tmp_path: Path) -> None:
    text = "\n".join([*mlperf(1), *(megatron(step, "3.1") for step in range(1, 50))])
    rows = tidy(read(write(tmp_path / "a.log", text)))
    assert "lines of megatron are not read: format=megatron reads those" in rows.attrs["notes"][0]
    assert tidy(read(tmp_path / "a.log", "megatron"))["step"].tolist() == [*range(1, 50)]


def test_figures_of_ever_other_names_are_bounded(tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", "".join(f"step:{i}/9 val_loss:1.{i} x{i}:1\n" for i in range(1000)))
    table = read(path)
    assert table.shape == (1000, 200)
    assert "the first 200 figures" in table.attrs["notes"][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.txt"])
def test_a_million_rows_take_ten_seconds(name: str, tmp_path: Path) -> None:
    rows = range(1_000_000)
    forms = {
        "a.csv": ["step,val_loss\n", *(f"{i},3.{i % 997}\n" for i in rows)],
        "a.jsonl": [f'{{"step": {i}, "val_loss": 3.{i % 997}}}\n' for i in rows],
        "a.txt": [f"step:{i}/9 val_loss:3.{i % 997} train_time:{i}ms step_avg:1.0ms\n" for i in rows],
    }
    path = write(tmp_path / name, "".join(forms[name]))
    start = time.process_time()
    table = read(path)
    assert time.process_time() - start < 10
    assert len(tidy(table)) == 1_000_000


LINES = {
    "megatron": lambda s, v: megatron(s, f"{v:.6E}"),
    "torchtitan": lambda s, v: titan(0, f"step: {s:2}  loss: {v:7.4f}  grad_norm:  1.2500  tps: {s:,}"),
    "nanochat": lambda s, v: (
        f"step {s:05d}/99999 (1.00%) | loss: {v:.6f} | lrm: 1.00 | dt: 1.00ms | total time: 0.10m"
    ),
    "llmc": lambda s, v: f"step {s:4d}/99999 | loss {v:.6f} (+nanz)| norm 1.0 (+nanz)| lr 1e-4 | 1.0 ms",
    "modded_nanogpt": lambda s, v: f"step:{s}/99999 train_loss:{v:.4f} train_time:{s}ms",
    "torchtune": lambda s, v: f"Step {s} | loss:{v} lr:1e-05 ",
}


@given(
    st.sampled_from([*LINES]),
    st.lists(st.integers(1, 9999), min_size=2, max_size=12, unique=True),
    st.lists(st.sampled_from([0.5, 12.25, 1234.5, -1.5, NAN]), min_size=12, max_size=12),
    st.lists(st.sampled_from(["", "noise", "loss: 3", "\x1b[0m", "x" * 500]), min_size=12, max_size=12),
    st.integers(0, 8),
)
def test_reading_keeps_every_loss_and_never_loses_the_last_step(
    format: str, steps: list[int], losses: list[float], noise: list[str], cut: int
) -> None:
    """The step of a last line that is cut within its figures counts, and a loss only where it is whole."""
    steps = sorted(steps)
    lines = [f"{other}\n{LINES[format](*row)}\n" for other, *row in zip(noise, steps, losses, strict=False)]
    rows = tidy(read_log("".join(lines), format), "a", "train_loss")
    assert rows["step"].tolist() == steps
    np.testing.assert_allclose(rows["value"], losses[: len(steps)])
    assert rows.attrs["last"] == {"a": steps[-1]}
    text = "".join(lines)
    rows = tidy(read_log(text[: len(text) - cut], format), "a", "train_loss")
    np.testing.assert_allclose(rows["value"], losses[: len(rows)])
    assert len(rows) >= len(steps) - 1
    assert rows.attrs["last"] == {"a": steps[-1]}
