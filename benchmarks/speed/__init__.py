"""How fast training runs, compared with bare loops and other projects."""
