"""Fingerprints of settings and prompts, by which resuming notices a change."""

from __future__ import annotations

import subprocess
import sys

import pytest

from refusion_lit.utils.files import check_fingerprint, digest, prompts_fingerprint

RECORDED = {"prompts": {"num_prompts": 2, "digest": "ab"}, "decoder": {"class": "ReFusion", "k": None}, "weights": "w"}


def check(**changes: object) -> None:
    check_fingerprint("resume", "x.jsonl", RECORDED, {**RECORDED, **changes}, fix="Start again")


def test_the_same_fingerprint_and_one_that_knows_less_are_taken() -> None:
    check()
    check(weights=None)
    check_fingerprint("resume", "x.jsonl", RECORDED, {"weights": "w", "task": {"class": "Sheet"}}, fix="Start again")


def test_what_differs_is_named_with_both_values() -> None:
    with pytest.raises(ValueError, match=r"^resume: x\.jsonl .*: weights was 'w', is 'v'\. "):
        check(weights="v")
    with pytest.raises(ValueError, match=r"decoder\.k was None, is 3\. Start again\.$"):
        check(decoder={"class": "ReFusion", "k": 3})
    many = {"class": "LLaDA", "k": 1, "steps": 2, "eps": 3, "order": "random"}
    with pytest.raises(ValueError, match=r"decoder\.class was 'ReFusion', is 'LLaDA'; .* and 2 more\."):
        check(decoder=many)


def test_prompts_are_told_apart_by_id_and_content_not_by_order() -> None:
    prompts = [("a", "1+1"), ("b", "2+2")]
    assert prompts_fingerprint(prompts) == prompts_fingerprint(reversed(prompts))
    others = [[("a", "1+1")], [("a", "1+1"), ("b", "2+3")], [("a", "1+1"), ("c", "2+2")], [("a", "2+2"), ("b", "1+1")]]
    digests = {prompts_fingerprint(other)["digest"] for other in [prompts, *others]}
    assert len(digests) == 5
    assert prompts_fingerprint(prompts)["num_prompts"] == 2


def test_a_digest_is_the_same_in_every_process() -> None:
    code = "from refusion_lit.utils.files import digest; print(digest({'b': [1, 2.5, None], 'a': '\\ud800'}))"
    actual = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert actual == digest({"a": "\ud800", "b": [1, 2.5, None]})
    assert len(actual) == 16
