from click.testing import CliRunner

from elasticd.cli.command_error import CommandError
from elasticd.cli.top_command import top


def test_without_a_terminal_it_says_what_to_use_instead() -> None:
    result = CliRunner().invoke(top, ["train"], standalone_mode=False)
    assert isinstance(result.exception, CommandError)
    assert "status --watch" in result.exception.sentence
