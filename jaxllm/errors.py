"""The one exception that means "the user can mend this": printed as a single line, exit code 2."""


class UserError(ValueError):
    """A wrong input. The message is one line that names the key or file, the wrong value and the fix."""
