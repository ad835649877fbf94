"""Many (model, cluster, batch) jobs: read, shared out over workers, journalled, cached, tabulated."""
