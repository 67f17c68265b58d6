//! What the shim, runtime clients and the agent say to each other.
