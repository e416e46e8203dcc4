"""Extensions of another package, as an installer leaves them: the template of docs/examples/extension, and one full of faults.

Oracles: float64 and numpy through the checks of the suites; the entry points that each package declares.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import store
from harness.report import write_report
from harness.store import case

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "docs/examples/extension"
OWNER = {"fp8-harness-example": "0.1.0"}

# One process for all that the sound package must do: starting one takes longer than what it then does.
SOUND = """
import contextlib, io, json, sys
from harness.__main__ import main
def run(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return code, out.getvalue(), err.getvalue()
said = {"mistyped": run("sweep=gemn")}
said["imported"] = sorted(m for m in sys.modules if m == "torch" or m.startswith("fp8_harness_example"))
said["extensions"] = run("list", "extensions")
said["imported later"] = sorted(m for m in sys.modules if m.startswith("fp8_harness_example"))
if __name__ == "__main__":
    words = ["device=cpu", "rounds=3", "timing.min_samples=3", "timing.min_seconds=0.01", "timing.warmup_min_seconds=0.05", "results_dir=results",
             "report=false", "control=false"]
    said["sweep"] = run("sweep=" + sys.argv[1], *words)
    said["train"] = run("sweep=train", "arms=[bf16_eager,example_e4m3_eager]", "model=example_tiny", "axes.compute=fp32",
                        "axes.seq=16", "axes.batch=2", "isolate=false", *words)
    said["advise"] = run("advise", "model=example_tiny", "gpu=h200")
    said["models"] = run("list", "models")
    import fp8core, torch
    from harness.cli.doctor import probe
    from fp8core import RECIPES, BACKENDS, convert_to_float8_training
    layer = convert_to_float8_training(torch.nn.Linear(32, 16), config=RECIPES["tensorwise"].with_backend("example_kernel"))
    said["layer"] = (str(layer.recipe), list(layer(torch.randn(16, 32)).shape))
    json.dump(said, open("said.json", "w"))
"""
FAULTY = """
[fp8_harness.peers]
torchao = faulty:PEER
te = faulty:PEER
broken_peer = faulty_import:PEER
wrong_peer = faulty:ANYTHING
[fp8_harness.suites]
gemm = faulty
broken_suite = faulty_import
wrong_suite = faulty:ANYTHING
bare_suite = faulty
[fp8_harness.recipes]
rowwise = faulty:RECIPE
broken_recipe = faulty_import:RECIPE
torchao_rowwise = faulty:CLASHING
[fp8_harness.models]
nano = faulty:MODEL
broken_model = faulty_import:MODEL
[fp8_harness.backends]
torch = faulty:BACKEND
broken_backend = faulty_import:BACKEND
"""
ASKED = """
import contextlib, io, json
from harness.__main__ import main
def run(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return code, out.getvalue(), err.getvalue()
said = {
    "all": run("sweep=peers", "dry_run=true", "device=cpu"),
    "peers": run("sweep=peers", "peers=[broken_peer]", "dry_run=true", "device=cpu"),
    "suite": run("sweep=./broken.yaml", "dry_run=true", "device=cpu"),
    "model": run("advise", "model=broken_model", "gpu=h200"),
    "recipe": run("sweep=train", "train.mixed_precision=fp8", "train.recipe=broken_recipe", "dry_run=true", "device=cpu"),
}
from harness.suites.extended import faults
said["faults"] = {f"{e.table} {e.name}": why for e, why in faults().items()}
import fp8core
try:
    fp8core.RECIPES["tensorwise"].with_backend("broken_backend")
except ValueError as error:
    said["backend"] = str(error)
from harness.suites import SUITES
said["arms"] = {name: {a: i.absent for a, i in SUITES[name].ARMS.items() if i.absent} for name in ("linear", "gemm", "divergence")}
said["ours"] = SUITES["gemm"].__name__
json.dump(said, open("said.json", "w"))
"""


def run_in(folder: Path, script: str, site: Path, *words: str) -> dict[str, Any]:
    (folder / "asked.py").write_text(script)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "asked.py", *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads((folder / "said.json").read_text())
    return said


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What the template does once an installer has put it beside the harness; nothing is fetched."""
    folder = tmp_path_factory.mktemp("sound")
    shutil.copytree(TEMPLATE, folder / "source")
    pip = "-m pip install --quiet --disable-pip-version-check --no-deps --no-index --no-build-isolation --target site ./source"
    subprocess.run([sys.executable, *pip.split()], cwd=folder, check=True)
    sweep = folder / "source/sweeps/example.yaml"
    return run_in(folder, SOUND, folder / "site", str(sweep)), folder


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a package does whose entry points are taken, broken or of another type."""
    folder = tmp_path_factory.mktemp("faulty")
    info = folder / "site/faulty_fp8-0.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-fp8\nVersion: 0.2\n")
    (info / "entry_points.txt").write_text(FAULTY)
    (folder / "site/faulty.py").write_text(
        "from dataclasses import replace\nfrom fp8core import RECIPES\nANYTHING = 3\n"
        "CLASHING = replace(RECIPES['rowwise'], name='torchao_rowwise')\n"
    )
    (folder / "site/faulty_import.py").write_text("raise RuntimeError('needs a driver\\nthat is not here')\n")
    (folder / "broken.yaml").write_text("# Does it run?\nsuite: broken_suite\n")
    return run_in(folder, ASKED, folder / "site")


def test_the_list_is_read_without_importing_anything(sound: tuple[dict[str, Any], Path]) -> None:
    said, _ = sound
    assert said["mistyped"][0] == 2
    assert said["imported"] == []
    code, out, _ = said["extensions"]
    assert code == 0
    assert said["imported later"] == []
    assert out.count("fp8-harness-example 0.1.0, not ours") == 5


def test_its_peer_recipe_backend_and_suite_are_measured_in_one_sweep(
    sound: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    """By workers in processes of their own. The numerics are those that the suites judge every arm by."""
    said, folder = sound
    assert said["sweep"][0] == 0, said["sweep"]
    frame = store.read(sorted((folder / "results/example").iterdir()))
    assert set(frame["status"]) == {"ok"}
    timed = set(map(tuple, frame[frame["metric"] == "time_ms"][["suite", "arm"]].to_numpy()))
    assert timed >= {
        ("cast", "example_eager"),
        ("gemm", "example_tensorwise_eager"),
        ("gemm", "example_rowwise_eager"),
        ("linear", "example_e4m3_eager"),
        ("example_transpose", "example_transposed"),
    }
    wrong = frame[(frame["metric"] == "mismatches") & frame["suite"].isin(["cast", "example_transpose"])]
    assert (wrong["value"] == 0).all()
    assert len(wrong) >= 6
    layer = frame[(frame["arm"] == "example_e4m3_eager") & (frame["metric"] == "sqnr_db")].iloc[0]
    resolved = json.loads(layer["resolved"])
    assert layer["value"] > resolved["sqnr_bound_db"]["sqnr_db"]
    assert resolved["backend"] == "example_kernel"
    assert (resolved["fp8_gemms"], resolved["fp8_gemms_expected"]) == (3, 3)

    for row in frame.to_dict("records"):
        others = row["suite"] == "example_transpose" or case.arm_of(row).peer == "example"
        others |= case.arm_of(row).recipe == "example_e4m3"
        assert json.loads(row["resolved"]).get("extensions") == (OWNER if others else None), row["arm"]
    page = write_report([folder / "results"], tmp_path / "r.html").html.with_suffix(".md").read_text()
    assert "extensions, not part of the harness | fp8-harness-example 0.1.0" in page


def test_its_model_is_trained_and_advised(sound: tuple[dict[str, Any], Path]) -> None:
    said, folder = sound
    assert said["train"][0] == 0, said["train"]
    frame = store.read(sorted((folder / "results/train").iterdir()))
    steps = frame[frame["metric"] == "time_ms"]
    assert set(steps["status"]) == {"ok"}
    assert all(json.loads(text)["extensions"] == OWNER for text in steps["resolved"])
    assert said["advise"][0] == 0
    assert "\nasked: example_tiny on H200" in said["advise"][1]
    assert "[fp8-harness-example 0.1.0, not ours]" in said["models"][1]
    assert said["layer"] == ["tensorwise, backend=example_kernel", [16, 16]]


def test_what_is_refused_is_an_arm_with_its_reason_and_harms_no_other(faulty: dict[str, Any]) -> None:
    code, out, err = faulty["all"]
    assert code == 0, err
    assert "rowwise_eager,rowwise_compile," in out
    absent = faulty["arms"]["linear"]
    assert set(absent) == {
        *("broken_peer", "wrong_peer", "torchao_of_faulty_fp8", "te_of_faulty_fp8"),
        *("broken_recipe", "rowwise_of_faulty_fp8", "torchao_rowwise_of_faulty_fp8"),
    }
    assert set(faulty["arms"]["divergence"]) == {"broken_recipe", "rowwise_of_faulty_fp8"}
    for name, reason in absent.items():
        assert "package faulty-fp8 0.2" in reason
        assert f"{name} skipped: {reason}" in out
        assert ("fp8-harness" in reason) == name.endswith("_of_faulty_fp8"), (
            "both packages of a contested name"
        )
    assert "RuntimeError: needs a driver that is not here" in absent["broken_peer"]
    assert "it is of type int; expected a harness.peers.peer.Peer" in absent["wrong_peer"]
    assert faulty["ours"] == "harness.suites.gemm"
    assert "gemm" not in faulty["arms"]["gemm"]


def test_every_fault_is_listed_with_its_package(faulty: dict[str, Any]) -> None:
    declared = [line.split(" = ")[0] for line in FAULTY.splitlines() if " = " in line]
    listed = {key.split()[1]: why for key, why in faulty["faults"].items()}
    assert set(listed) == set(declared) - {"torchao_rowwise"}, "that one is sound but for its arms"
    assert all("faulty-fp8 0.2" in why and "\n" not in why for why in listed.values())
    assert "expected a module" in listed["wrong_suite"]
    assert "the module lacks AXES, ARMS, points, unsupported, work" in listed["bare_suite"]
    warned = [line for line in faulty["all"][2].splitlines() if line.startswith("warning: ")]
    assert {line.removeprefix("warning: ") for line in warned} == set(listed.values())


@pytest.mark.parametrize("asked", ["peers", "suite", "model", "recipe"])
def test_naming_a_broken_one_is_one_line_and_exit_code_2(faulty: dict[str, Any], asked: str) -> None:
    code, _, err = faulty[asked]
    errors = [line for line in err.splitlines() if not line.startswith("warning: ")]
    if asked == "peers":  # the baselines run: a skipped arm says why
        assert code == 0
        assert "broken_peer skipped: peer 'broken_peer' of package faulty-fp8 0.2" in faulty[asked][1]
        return
    assert code == 2
    (line,) = errors
    for part in (
        f"error: {asked} 'broken_{asked}' of package faulty-fp8 0.2",
        "faulty_import",
        "RuntimeError: needs a driver",
    ):
        assert part in line
    assert "backend 'broken_backend' of package faulty-fp8 0.2" in faulty["backend"]
