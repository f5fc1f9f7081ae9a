"""Who pays for blocked texts: the operator's old name is still read, and versions stay the same."""

from moderation.policy import Payer, Policy

# Versions that the product gave before the operator's value changed from `house`.
ROLES = {"roles": ["user", "tool"]}  # the default then
BOTH_BY_OPERATOR = {**ROLES, "blocked_input_paid_by": "house", "cut_output_paid_by": "house"}


def test_the_old_value_of_the_operator_is_read_and_keeps_the_policy_s_version() -> None:
    old = Policy.from_dict(BOTH_BY_OPERATOR)
    assert old.cut_output_paid_by is Payer.OPERATOR
    assert old.to_dict()["cut_output_paid_by"] == "operator"
    assert Policy.from_dict(old.to_dict()).version == old.version == "pol_b7834e43b1cae161"
    assert Policy.from_dict(ROLES).version == "pol_db499cf1c0acc222"
