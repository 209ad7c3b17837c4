"""One module per solver package, each the only one to import it.

The registry names them; nothing is exported here, so that importing one solver loads no other.
"""
