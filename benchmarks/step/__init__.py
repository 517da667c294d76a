"""What a step costs on the CPU: time on gloo, the runtime's Python, what it asks the device for, and bytes."""
