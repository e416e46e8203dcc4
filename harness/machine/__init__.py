"""Machine: where it ran and what it can reach. Environment, hardware table, ceilings, links, processes and ranks."""
