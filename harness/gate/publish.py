"""Publish: a judgement in the forms that CI systems read: JUnit XML, annotations of GitHub, the body of a comment.

A form says of everything what the exit code says: what failed the gate is a failure, what was not decided is skipped
and never passed, and where there is no verdict the file says so, so that none of an earlier gate is taken for it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from harness.gate.decide import Verdict
from harness.gate.exit_code import Exit, Loud
from harness.gate.render import headline, markdown

if TYPE_CHECKING:
    from harness.gate.judge import Finding, Judgement

MARKER = "<!-- harness gate -->"  # by which a later comment finds the one that it replaces
MOST_COMMENT = 60_000  # characters; GitHub takes 65,536
MOST_ANNOTATIONS = 10  # errors that GitHub shows of a step; the last one says how many more there are
_FILE = re.compile(r"([\w./-]+\.py)::")
_UNPRINTABLE = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in no XML document


def junit(judgement: Judgement) -> str:
    """JUnit XML: one test a unit, and one for the whole."""
    suite = _suite()
    for f in judgement.findings:
        case = _case(suite, f"{f.unit.suite}.{f.unit.case}", _name(f))
        words = f"{f.verdict}: {f.reason}"
        if f.verdict is Verdict.REGRESSED and f.counts:
            ET.SubElement(case, "failure", message=_text(words), type=str(f.verdict))
        elif f.verdict in (Verdict.REGRESSED, Verdict.INCONCLUSIVE):  # only reported, allowed, or open
            ET.SubElement(case, "skipped", message=_text(words))
    return _whole(suite, judgement.code, headline(judgement))


def junit_of(code: Exit, text: str) -> str:
    """JUnit XML of a gate that judged no unit: nothing to measure (exit 0), or no verdict."""
    return _whole(_suite(), code, text)


def github_lines(judgement: Judgement) -> str:
    """Workflow commands of GitHub: an error for what fails the gate, a warning for what is open, a line each."""
    lines = []
    worst = [f for f in judgement.findings if f.counts]
    for f in worst[: MOST_ANNOTATIONS - 1]:
        words = f"{f.unit.suite} {f.unit.case}: {_name(f)}: {f.reason}"
        lines.append(_command("error", f"Gate: {f.verdict}", words, _file_of(f)))
    if len(worst) >= MOST_ANNOTATIONS:
        lines.append(_command("error", "Gate", f"{len(worst) - MOST_ANNOTATIONS + 1} more regressions"))
    elif judgement.code is not Exit.OK and not worst:
        lines.append(_command("error", f"Gate: exit {int(judgement.code)}", headline(judgement)))
    told = [n for n in judgement.notes if isinstance(n, Loud)]
    lines += [_command("warning", "Gate", note) for note in told]
    if judgement.undecided and judgement.code is Exit.OK:
        words = f"{len(judgement.undecided)} of {len(judgement.times)} times are undecided"
        lines.append(_command("warning", "Gate", words))
    return "".join(line + "\n" for line in lines)


def annotation_of(code: Exit, text: str) -> str:
    """The annotation of a gate without a verdict."""
    return _command("error", f"Gate: no verdict (exit {int(code)})", text) + "\n"


def comment(judgement: Judgement) -> str:
    """The body of a comment on a pull request: the headline, with the table folded in."""
    head, _, rest = markdown(judgement).partition("\n")
    if len(rest) > MOST_COMMENT:
        rest = rest[:MOST_COMMENT].rpartition("\n")[0] + "\n\nThe rest is in the job's summary.\n"
    loud = [f"> **{n}**" for n in judgement.notes if isinstance(n, Loud)]
    body = [
        MARKER,
        head,
        "",
        *loud,
        *([""] if loud else []),
        "<details><summary>Verdicts</summary>",
        rest,
        "</details>",
    ]
    return "\n".join(body) + "\n"


def comment_of(head: str, text: str) -> str:
    """The same of a gate that judged no unit."""
    return f"{MARKER}\n### Gate: {head}\n\n{' '.join(text.split())}\n"


def _suite() -> ET.Element:
    return ET.Element("testsuite", name="gate")


def _case(suite: ET.Element, where: str, name: str) -> ET.Element:
    return ET.SubElement(suite, "testcase", classname=_text(where), name=_text(name), time="0")


def _whole(suite: ET.Element, code: Exit, text: str) -> str:
    case = _case(suite, "gate", "verdict")
    if code in (Exit.REGRESSED, Exit.NUMERICS):
        ET.SubElement(case, "failure", message=_text(text), type=code.name)
    elif code is not Exit.OK:
        ET.SubElement(case, "error", message=_text(text), type=code.name)
    else:
        ET.SubElement(case, "system-out").text = _text(text)
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite)))
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _name(f: Finding) -> str:
    return " ".join(filter(None, (f.unit.arm, f.unit.metric, f.unit.regime, f.unit.part)))


def _text(words: str) -> str:
    return _UNPRINTABLE.sub("?", words)


def _file_of(f: Finding) -> str:
    """The file of a pytest-benchmark test; of other units no file is known to be at fault."""
    found = _FILE.search(f.unit.case)
    return found[1] if found else ""


def _command(kind: str, title: str, words: str, file: str = "") -> str:
    about = [f"file={_escaped(file)}"] if file else []
    about.append(f"title={_escaped(title)}")
    message = words.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{kind} {','.join(about)}::{message}"


def _escaped(value: str) -> str:
    """A property of a workflow command."""
    for character, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A"), (":", "%3A"), (",", "%2C")):
        value = value.replace(character, code)
    return value
