"""Environment. Oracles: the interpreter's own answers on CPU, fakes with known facts for the GPU path."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import torch
from fakes import FakeCuda, FakeNvml

from harness import store
from harness.machine import environment
from harness.machine.environment import ENV_ID_FIELDS, device_kind, env_id, fingerprint, snapshot
from harness.machine.gpu_monitor import GpuMonitor, Monitor
from harness.store.differences import GENERATED
from harness.store.errors import UsageError


def test_cpu_fingerprint_states_this_machine() -> None:
    facts = fingerprint("cpu")
    assert facts["device"] == "cpu"
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["cpu_threads"] == psutil.cpu_count()
    assert facts["omp_num_threads"] == os.environ.get("OMP_NUM_THREADS")
    assert facts["cpu"]
    assert "gpu" not in facts
    assert json.loads(json.dumps(facts)) == facts, "plain JSON values only"


def test_gpu_fingerprint_on_fakes(
    fake_cuda: FakeCuda, fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of machine and chip are hashed."""
    monkeypatch.setattr("socket.gethostname", lambda: "very-secret-host")
    with GpuMonitor(uuid=fake_nvml.UUID, nvml=fake_nvml) as monitor:
        facts = fingerprint("cuda", monitor, fake_cuda)
    expected = {
        "device": "cuda",
        "gpu": "NVIDIA H200",
        "gpu_count": 1,
        "gpu_memory_gib": 140.4,
        "gpu_sm_count": 132,
        "gpu_l2_mib": 50.0,
        "gpu_capability": "9.0",
        "driver": "580.159.03",
        "power_limit_w": 700.0,
        "max_sm_clock_mhz": 1980.0,
        "ecc": True,
        "mig": False,
        "nvml_problem": None,
    }
    assert {name: facts[name] for name in expected} == expected
    text = json.dumps(facts)
    assert json.loads(text) == facts
    assert "very-secret-host" not in text
    assert fake_nvml.UUID[:8] not in text


def test_a_gpu_without_nvml_keeps_what_torch_knows(fake_cuda: FakeCuda) -> None:
    broken = FakeNvml(refused=("nvmlInit",))
    with GpuMonitor(index=0, nvml=broken) as monitor:
        facts = fingerprint("cuda", monitor, fake_cuda)
    assert facts["gpu"] == "NVIDIA H200"
    assert facts["power_limit_w"] is None
    assert facts["driver"] is None
    assert facts["nvml_problem"] == "NVML: Not Supported"
    assert "driver" not in fingerprint("cuda", Monitor(), fake_cuda)


def test_a_monitor_is_opened_by_uuid_and_closed_where_none_is_given(
    monkeypatch: pytest.MonkeyPatch, fake_cuda: FakeCuda, fake_nvml: FakeNvml
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml)
    fake_cuda.get_device_properties = lambda device: fake_cuda.properties  # type: ignore[method-assign]
    for name in ("get_device_properties", "current_device", "device_count"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake_cuda, name))
    assert fingerprint("cuda")["power_limit_w"] == 700.0
    assert fake_nvml.opened == 0


def test_env_id_moves_with_every_field_it_names_and_with_no_other() -> None:
    facts = fingerprint("cpu")
    base = env_id(facts)
    assert len(base) == 10
    for name in ENV_ID_FIELDS:
        assert env_id({**facts, name: "something else"}) != base, name
    for name in ("git_commit", "git_dirty", "host_hash", "gpu_uuid_hash", "memory_gib", "numpy", "os"):
        assert name not in ENV_ID_FIELDS
        assert env_id({**facts, name: "something else"}) == base
    assert env_id(dict(reversed(facts.items()))) == base, "order of the mapping does not count"


@pytest.mark.parametrize("peer", ["torchao", "transformer_engine", "deep_gemm", "aiter"])
def test_another_version_of_a_peer_is_another_environment(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each library that an adapter asks the version of; by the name that its package has."""
    packages = {"aiter": "amd-aiter"}
    installed = {packages.get(peer, peer.replace("_", "-")): "2.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    before = fingerprint("cpu")
    assert before[peer] == "2.0"
    installed = dict.fromkeys(installed, "2.1")
    assert env_id(fingerprint("cpu")) != env_id(before) != env_id({**before, peer: None})


def test_the_sources_of_extensions_are_hashed_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package's every file, and a module that is a file alone; what no entry point names does not count."""
    (tmp_path / "acme_fp8/deep").mkdir(parents=True)
    files = [
        tmp_path / "acme_fp8/__init__.py",
        tmp_path / "acme_fp8/deep/kernel.py",
        tmp_path / "acme_suite.py",
    ]
    for file in (*files, tmp_path / "other.py"):
        file.write_text("raise ImportError\n")
    entries = {
        "peers": metadata.EntryPoint("acme", "acme_fp8.deep.kernel:PEER", "fp8_harness.peers"),
        "suites": metadata.EntryPoint("acme", "acme_suite", "fp8_harness.suites"),
        "recipes": metadata.EntryPoint("gone", "acme_gone:RECIPE", "fp8_harness.recipes"),
    }
    monkeypatch.setattr(
        metadata, "entry_points", lambda group: [e for e in entries.values() if e.group == group]
    )
    monkeypatch.syspath_prepend(tmp_path)

    def hashed() -> str | None:
        environment.extensions_hash.cache_clear()
        return environment.extensions_hash()

    seen = [hashed()]
    (tmp_path / "other.py").write_text("1\n")
    assert hashed() == seen[0] is not None
    for file in files:
        file.write_text("1\n")
        seen.append(hashed())
    assert len(set(seen)) == len(files) + 1
    entries.clear()
    assert hashed() is None
    environment.extensions_hash.cache_clear()


def test_environments_keep_the_ids_that_are_stored() -> None:
    """Oracle: every row that is committed; runs that were made before a field was added can still be resumed."""
    rows = store.read(Path(environment.__file__).parents[2] / "results")
    stored = [(i, json.loads(env)) for i, env in rows.groupby("env_id")["env"].first().items()]
    assert stored
    assert [env_id(env) for _, env in stored] == [i for i, _ in stored]


def test_every_field_of_env_id_is_one_that_a_fingerprint_has(
    fake_cuda: FakeCuda, fake_nvml: FakeNvml
) -> None:
    """A misspelt field would silently count as None for ever. What marks generated rows no machine has."""
    with GpuMonitor(index=0, nvml=fake_nvml) as monitor:
        facts = set(fingerprint("cuda", monitor, fake_cuda))
    assert set(ENV_ID_FIELDS) - facts == {GENERATED}


def test_snapshot_holds_load_memory_and_the_monitors_readings(fake_nvml: FakeNvml) -> None:
    bare = snapshot()
    assert bare["time_utc"].endswith("+00:00")
    assert 0 < bare["memory_available_gib"] <= psutil.virtual_memory().total / 2**30
    assert bare["load_average_1min"] >= 0
    with GpuMonitor(index=0, nvml=fake_nvml) as monitor:
        full = snapshot(monitor)
        assert full == full | monitor.state()
    assert set(full) == set(bare) | set(monitor.state())


@pytest.mark.parametrize(
    ("word", "has_gpu", "build", "found"),
    [
        ("auto", True, "13.0", "cuda"),
        ("auto", False, "13.0", "cpu"),
        ("cpu", True, "13.0", "cpu"),
        ("cuda", True, "13.0", "cuda"),
        ("cuda", False, None, "a CPU build"),
        ("cuda", False, "13.0", r"built for CUDA 13\.0"),
        ("mps", True, "13.0", "must be auto, cpu or cuda$"),
        ("CUDA", True, "13.0", "must be auto, cpu or cuda$"),
        ("cuda:1", True, "13.0", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_words_for_devices(
    word: str, has_gpu: bool, build: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.version, "cuda", build)
    if found in ("cpu", "cuda"):
        assert device_kind(word) == found
    else:
        with pytest.raises(UsageError, match=found):
            device_kind(word)


X86 = "processor\t: 0\nmodel name\t: AMD EPYC 9654\nflags\t\t: fpu sse2 avx2 avx512f amx_bf16 f16c\n\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd sve bf16\n\n"


@pytest.mark.parametrize(
    ("text", "model", "isa"),
    [
        (X86, "AMD EPYC 9654", ["f16c", "avx2", "avx512f", "amx_bf16"]),
        (ARM, None, ["asimd", "bf16", "sve"]),
        ("", None, []),
    ],
)
def test_cpu_model_and_instruction_sets(tmp_path: Path, text: str, model: str | None, isa: list[str]) -> None:
    """Oracle: excerpts of /proc/cpuinfo, x86 and Arm; without a model name the platform's own."""
    if text:  # else as where there is no such file
        (tmp_path / "cpuinfo").write_text(text)
    fallback = platform.processor() or platform.machine()
    assert environment._cpu_model(tmp_path / "cpuinfo") == (model or fallback, isa)


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


def test_git_state(tmp_path: Path) -> None:
    """Outside of a repository, before and after a commit, changed, and with an untracked file only."""

    def state() -> tuple[object, object]:
        facts = fingerprint("cpu", root=tmp_path)
        return facts["git_commit"], facts["git_dirty"]

    assert state() == (None, None)
    git(tmp_path, "init", "-q")
    assert state() == (None, None)
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit, dirty = state()
    assert isinstance(commit, str)
    assert len(commit) == 40
    assert dirty is False
    (tmp_path / "results.parquet").write_text("untracked")
    assert state() == (commit, False)
    (tmp_path / "file").write_text("2")
    assert state() == (commit, True)


def test_the_project_is_the_checkout_or_else_the_working_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = tmp_path / "site-packages" / "harness" / "machine" / "environment.py"
    monkeypatch.setattr(environment, "__file__", str(module))
    assert environment._project() == Path.cwd()
    (tmp_path / "site-packages" / ".git").mkdir(parents=True)
    assert environment._project() == tmp_path.resolve() / "site-packages"
