"""Numbers over instances: how often one method is better."""

from steptuned.lab.report.instances import compare


def test_a_comparison_counts_instances_and_gives_an_interval():
    table = {"a": [1.0, 2.0, None, 4.0, None], "b": [2.0, 1.0, 3.0, None, None]}
    c = compare(table, "a", "b")
    assert (c.wins, c.instances) == (2, 4), "a number beats none; none against none is no instance"
    assert c.median_ratio == 1.25
    assert c.low < 0.5 < c.high
