"""The file of --policy."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from elasticd.cli.command_error import CommandError
from elasticd.cli.policy import SETTINGS
from elasticd.cli.run_command import run
from elasticd.cli.run_configuration import Planned
from elasticd.core.facts import Policy
from elasticd.core.hang.judging import Patience
from elasticd.daemon.config import RunConfig
from tests.cli.commandline import planned, refused

ROOT = Path(__file__).parents[2]
OF_OPTIONS_ALONE = {"resume", "straggler_drain"}


def with_policy(folder: Path, text: str | bytes, *argv: str) -> Planned:
    (folder / "policy.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    (folder / "job.py").touch()
    return planned("--policy", str(folder / "policy.toml"), *argv, str(folder / "job.py"))


def configured(folder: Path, text: str | bytes, *argv: str) -> RunConfig:
    return with_policy(folder, text, *argv).config


def test_a_file_may_set_all_of_the_policy_and_what_an_agent_goes_by(tmp_path: Path) -> None:
    of_agents = {"hang_floor_s", "hang_ceiling_s", "etcd_grace_s", "audit_every"}
    assert {*SETTINGS, *OF_OPTIONS_ALONE} == {f.name for f in fields(Policy)} | of_agents
    wanted = {name: 11 + n for n, name in enumerate(SETTINGS)}
    text = "".join(f"{name} = {value}\n" for name, value in wanted.items())
    config = configured(tmp_path, text, "--audit")
    assert (config.etcd_grace_s, config.audit) == (wanted.pop("etcd_grace_s"), wanted.pop("audit_every"))
    assert config.patience == Patience(wanted.pop("hang_floor_s"), wanted.pop("hang_ceiling_s"))
    assert {name: getattr(config.policy, name) for name in wanted} == wanted


def test_what_a_file_does_not_set_is_as_without_it(tmp_path: Path) -> None:
    config = configured(tmp_path, "# nothing\n")
    assert (config.policy, config.patience) == (Policy(), Patience())


def test_an_option_outweighs_the_file_and_the_file_outweighs_torchruns_settings(tmp_path: Path) -> None:
    torchruns = ("--rdzv-conf", "join_timeout=7,last_call_timeout=8")
    policy = configured(
        tmp_path, "join_timeout_s = 9\nnode_ttl_s = 10", *torchruns, "--node-ttl", "11"
    ).policy
    assert (policy.settle_s, policy.join_timeout_s, policy.node_ttl_s) == (8, 9, 11)


def test_settings_that_were_not_given_make_room_for_those_that_were(tmp_path: Path) -> None:
    policy = configured(tmp_path, "quarantine_max_s = 5").policy
    assert (policy.quarantine_s, policy.quarantine_max_s) == (5, 5)
    policy = configured(tmp_path, "quarantine_s = 1000").policy
    assert (policy.quarantine_s, policy.quarantine_max_s) == (1000, 1000)
    assert configured(tmp_path, "hang_floor_s = 7200").patience == Patience(7200, 7200)
    assert configured(tmp_path, "restarts_max = 5").policy.futile_max == 6
    assert configured(tmp_path, "futile_max = 2", "--max-restarts", "5").policy.futile_max == 2


def test_bounds_of_hangs_that_one_limit_for_all_outweighs_are_named(tmp_path: Path) -> None:
    def notes(*argv: str) -> list[str]:
        told = with_policy(tmp_path, "hang_floor_s = 2\nhang_ceiling_s = 600", *argv).notes
        return [note for note in told if "hang" in note]

    assert notes() == notes("--hang-after", "auto") == []
    assert notes("--hang-after", "60") == [
        "hang_floor_s in the file of --policy has no effect beside --hang-after 60",
        "hang_ceiling_s in the file of --policy has no effect beside --hang-after 60",
    ]
    assert len(notes("--hang-after", "off")) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hang_flor_s = 1", "there is no setting hang_flor_s; did you mean hang_floor_s?"),
        ("straggler_drain = true", "there is no setting straggler_drain"),
        ("nonsense = 1", "the settings are settle_s, grow_cooldown_s"),
        ('settle_s = "1"', "settle_s is not a number"),
        ("settle_s = true", "settle_s is not a number"),
        ("settle_s = -0.1", "settle_s: the value -0.1 is less than 0"),
        ("settle_s = inf", "is not a finite number of seconds"),
        ("node_ttl_s = 1", "is less than 2, and etcd keeps no lease shorter than that"),
        ("futile_max = 1.5", "is not a whole number"),
        ("straggler_ratio = nan", "the value nan is not a number above 1"),
        ("straggler_ratio = 1", "is not a number above 1"),
        ("quarantine_s = 60\nquarantine_max_s = 5", "quarantine_s, 60, is above quarantine_max_s, 5"),
        ("hang_floor_s = 10\nhang_ceiling_s = 5", "hang_ceiling_s, 5, is below hang_floor_s, 10"),
        ("settle_s", "policy.toml is not TOML"),
        (b"settle_s = \xff", "policy.toml is not TOML"),
        ("settle_s = 1" + "0" * 400, "settle_s is not between -1,000,000,000 and 1,000,000,000"),
        ("straggler_ratio = 1" + "0" * 400, "straggler_ratio is not between"),
        ("futile_max = 0x" + "f" * 5000, "futile_max is not between"),
        ("futile_max = -9999999999", "futile_max is not between"),
        ("settle_s = 1" + "0" * 5000, "policy.toml is not TOML"),
        ("settle_s = " + "[" * 9999, "policy.toml is nested too deeply: each setting is a number"),
    ],
)
def test_what_makes_no_sense_in_a_file_is_one_sentence(text: str | bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError) as caught:
        configured(tmp_path, text)
    assert says in caught.value.sentence


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    assert "gone.toml: No such file or directory" in refused(
        "--policy", str(tmp_path / "gone.toml"), __file__
    )
    assert "Is a directory" in refused("--policy", str(tmp_path), __file__)


def test_the_guide_has_every_setting_with_its_option_and_its_default() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (?:`--([\w-]+)`)? *\| ([\d.]+) \|",
        (ROOT / "docs/policy.md").read_text(),
        re.MULTILINE,
    )
    assert [name for name, _, _ in rows] == list(SETTINGS)
    options = {option for p in run.params for option in p.opts}
    assert all(f"--{option}" in options for _, option, _ in rows if option)
    default, patience = Policy(), Patience()
    config = planned("--audit", __file__).config
    of_agents = {
        "hang_floor_s": patience.floor_s,
        "hang_ceiling_s": patience.ceiling_s,
        "etcd_grace_s": config.etcd_grace_s,
        "audit_every": config.audit,
    }
    assert {name: float(told) for name, _, told in rows} == {
        name: of_agents[name] if name in of_agents else getattr(default, name) for name in SETTINGS
    }
