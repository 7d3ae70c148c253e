"""The paper's claims, judged from a store of runs and from nothing else.

``criteria`` has the criteria of the package and their hash, ``judging`` what a judge is made of,
``verdicts`` the table of all claims and their verdicts. All other files have judges. Add a claim by
adding a file: see ``docs/extending/claim.md``.
"""
