"""Parts of the package."""
