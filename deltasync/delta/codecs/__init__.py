"""How the changes of a row become few bytes, and come back from them bit for bit."""
