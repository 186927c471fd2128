"""Do two runtimes train alike? Each trains in its own processes, from one checkpoint on the same batches."""
