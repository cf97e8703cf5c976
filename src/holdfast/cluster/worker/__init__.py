"""A worker: ``machine`` pulls rows and pushes gradients; ``process`` reads batches and computes."""
