"""Studies: real data, training, the re-initialisation protocol, and the demo that ties everything together."""
