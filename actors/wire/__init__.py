"""The wire between training ranks and engines: buffers in shared memory, and process groups over gloo."""
