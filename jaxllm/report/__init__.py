"""Pages and charts without network or script: pieces of HTML and SVG, a comparison of runs, calculators in closed form.

Nothing here reads a run, a model or a configuration: tasks do, and hand over plain numbers.
"""
