"""One file per solver package; each is imported only when it is asked for."""
