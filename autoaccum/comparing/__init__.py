"""Two saved runs, measurement by measurement: what became worse by more than is allowed, and what is only noise.

Pure: reads text, measures nothing, and knows no device.

    records      what a comparison consists of
    reading      files and the share that is allowed
    conditions   whether two runs can be compared, and what else differs
    figures      a run's measurements, each with the ends between which it may lie
    judging      one measurement of both runs: its verdict
    rows         which measurements of two runs belong together
    compare      the whole comparison
    words        texts of files where they cannot do harm
    markdown     the comparison as a table
"""
