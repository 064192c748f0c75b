"""What units do, one module for each kind: ``run(config, place, inputs, folder)`` reads folders, writes one, and returns a record."""
