"""What `tollhouse doctor` looks at: one file a part of the house."""
