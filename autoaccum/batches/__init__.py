"""Any sample -> n rows -> micro-batches -> weights.

Decides which parts of a batch belong to single rows and how to cut them. What is cut keeps its container type; what
does not belong to rows is passed on whole. Knows nothing of models, memory or devices.

    structure       what is a container, what is a leaf
    carriers        which parts may hold the rows, and how many
    layout          where the rows are
    cutting         taking rows out
    opaque          batches that only the caller's `split` cuts
    sources         which kind of source a sample makes; `source_kinds`: any number of rows from each
    slicing         one window cut into micro-batches; `pieces`: what they are; `packing`: by what rows cost
    weights         what the loss is a mean over; `denominators`: what torch's own losses divide by
"""
