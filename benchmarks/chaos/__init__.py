"""A store whose writer, readers and garbage collector are killed again and again.

`weights` says what each version is, without any store; `roles` has the processes, `run` kills and
restarts them, and `check` looks at what is left.
"""
