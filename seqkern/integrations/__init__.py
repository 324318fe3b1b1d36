"""seqkern inside other libraries' models. `import seqkern` imports none of it, and nothing patches by itself."""
