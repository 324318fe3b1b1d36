"""seqkern inside other libraries' models. Nothing here is imported by `import seqkern`, nor patches anything by itself."""
