"""What a network costs and attends to; nothing here trains it."""
