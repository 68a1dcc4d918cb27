"""One command per figure that the README claims."""
