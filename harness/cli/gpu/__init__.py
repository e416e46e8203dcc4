"""GPU session: parts in slots of a limited time, each with its own figures."""
