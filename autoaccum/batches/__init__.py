"""Any sample -> n rows -> micro-batches -> weights.

Decides which parts of a batch belong to single rows and how to cut them. What is cut keeps its container type; what
does not belong to rows is passed on whole. Knows nothing of models, memory or devices.

    structure   what is a container, what is a leaf
    layout      where the rows are
    cutting     taking rows out
    sources     data sets, loaders, functions, example batches: any number of rows
    weights     what the loss is a mean over
"""
