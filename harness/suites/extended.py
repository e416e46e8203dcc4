"""Extended: arms of the recipes and peers that other packages bring, beside ours; and whose a row is.

An extension that cannot be used has one arm in each suite that would have its arms: skipped, with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp8core.extensions import OURS, installed
from fp8core.gemm import BACKENDS
from fp8core.recipe import RECIPES
from harness.peers import PEERS
from harness.store.case import Arm
from harness.suites import NAMES, SUITES
from harness.timing.workload import ArmInfo, arm_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fp8core.extensions import Extension, ExtensionTable
    from harness.store.case import Case


def extended_table(arms: Mapping[Arm, ArmInfo], *tables: ExtensionTable[Any]) -> dict[str, ArmInfo]:
    """`arm_table` of arms of which some are extensions'; ours keep their names.

    Args:
        arms: of all entries of the tables.
        tables: `RECIPES`, `PEERS` or both: those that the arms were made of.
    """
    owners = {arm: _owners(arm) for arm in arms}
    absent = {of: (reason, each.is_contested(of)) for each in tables for of, reason in each.absent.items()}
    for arm, own in owners.items():
        for extension in own:
            same = [other for other in arms if str(other) == str(arm)]
            others = {owner.owner for other in same for owner in owners[other]} - {extension.owner}
            whose = ", ".join(sorted(others)) or OURS
            if len(same) > 1:
                reason = f"{extension} is refused: {whose} has an arm {str(arm)!r} too; rename it"
                absent[extension] = (reason, True)
    table = arm_table({arm: info for arm, info in arms.items() if not owners[arm]})
    table |= arm_table(
        {arm: info for arm, info in arms.items() if owners[arm] and not set(owners[arm]) & set(absent)}
    )
    for extension, (reason, is_contested) in absent.items():
        package = "".join(c if c.isalnum() else "_" for c in extension.package.lower())
        name = f"{extension.name}_of_{package}" if is_contested else extension.name
        arm = Arm(peer=name) if extension.table == "peers" else Arm(name)
        table |= arm_table({arm: ArmInfo(str(extension), peer=arm.peer, absent=reason)})
    return table


def _owners(arm: Arm) -> list[Extension]:
    """The extensions that an arm's recipe and peer are of."""
    return [of for of in (RECIPES.owner(arm.recipe), PEERS.owner(arm.peer)) if of is not None]


def used(case: Case, arm: Arm, resolved: Mapping[str, object]) -> dict[str, str]:
    """Package -> version of all that is not ours in what a row measured; {} where all is.

    Args:
        case: whose suite, and whose model by name, may be another package's.
        arm: whose recipe or peer may be; the recipe may name a backend.
        resolved: what ran, as far as it is known: its backend.
    """
    owners: list[Extension | None] = [*_owners(arm)]
    if case.suite not in NAMES and case.suite in SUITES:
        owners.append(SUITES.others.owner(case.suite))
    backends = {str(resolved.get("backend"))}
    if arm.has_fp8 and not arm.peer and arm.recipe in RECIPES:
        backends.add(RECIPES[arm.recipe].backend)
    owners += map(BACKENDS.owner, sorted(backends))
    if installed("models") and isinstance(model := dict(case.axes).get("model"), str):
        from harness.training.models import MODELS

        owners.append(MODELS.owner(model))
    return {of.package: of.version for of in owners if of is not None}


def faults() -> dict[Extension, str]:
    """Every extension of the five tables that cannot be used, with a sentence; imports all of them."""
    from harness.training.models import MODELS

    tables: tuple[ExtensionTable[Any], ...] = (PEERS, SUITES.others, RECIPES, MODELS, BACKENDS)
    return {extension: why for table in tables for extension, why in table.absent.items()}
