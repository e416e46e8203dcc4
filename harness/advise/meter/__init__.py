"""What a GPU would run, read from machine code without a GPU: see docs/kernels.md.

sass      text of nvdisasm -> instructions
walk      follows one program through them, with the loop counts of a given launch
integers  the integer instructions that decide where a program goes
model     facts -> predicted share of copy bandwidth; fixed before tuning
"""
