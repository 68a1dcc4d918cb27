"""The way of a text request, mounted by both houses: front door, pipeline, dispatch, migration, stream owner."""
