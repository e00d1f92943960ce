"""The pack directory and the sidecar files beside it."""
