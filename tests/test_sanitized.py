"""What runs under compute-sanitizer, without it."""

from tests import sanitized


def test_what_is_sanitized_gives_all_tokens():
    assert sanitized.main("cpu") == 0
