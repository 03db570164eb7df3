"""Token files, and the order in which a run reads them."""
