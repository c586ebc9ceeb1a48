"""What the images' build stages run (deploy/image/Dockerfile): standard library only."""
