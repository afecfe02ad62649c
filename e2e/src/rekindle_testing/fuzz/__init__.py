"""`make fuzz`: generated manifests against a real API server and the operator as a process."""
