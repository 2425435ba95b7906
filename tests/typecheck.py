"""The run-time checker of annotations: beartype, told that an int is a float, as Python's own typing rules say."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
