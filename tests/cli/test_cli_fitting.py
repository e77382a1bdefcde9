"""How lines are broken to fit a terminal."""

from elasticd.cli.say import fitted


def test_on_a_narrow_terminal_lines_are_broken_between_words_and_stay_below_what_they_tell_of() -> None:
    lines = [
        "train: round 1 live for 30 s, world 4 (2..6), step 591",
        "  goodput   83.3 % productive of 2 min of worker time; lost: 18 s forming worlds",
        "  its log   /home/somebody/.local/state/elasticd/logs/train_1/attempt_0/1 (on a)",
        "    slot 0  rank 0  running  step 589  19.77/s  pid 25595",
    ]
    assert fitted(lines, 40) == [
        "train: round 1 live for 30 s, world 4",
        "  (2..6), step 591",
        "  goodput   83.3 % productive of 2 min",
        "            of worker time; lost: 18 s",
        "            forming worlds",
        "  its log",
        "            /home/somebody/.local/state/elasticd/logs/train_1/attempt_0/1",
        "            (on a)",
        "    slot 0  rank 0  running  step 589",
        "      19.77/s  pid 25595",
    ]
    assert fitted(["", *lines], 160) == ["", *lines]
