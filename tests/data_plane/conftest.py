import pytest

# So that a failing assertion in it explains itself as one in a test file does.
pytest.register_assert_rewrite("tests.data_plane.conformance")
