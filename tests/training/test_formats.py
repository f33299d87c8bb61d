"""Formats of other programs give the conversations that the project's own give; mixtures and halves are refused."""

import json

import pytest
from fixtures import make_chats
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.training.data.formats import conversation_of, pair_of

TWO = make_chats.stated("q", "a", "r", "b", system="s")
BEFORE, GOOD, BAD = TWO[:-1], TWO[-1], {"role": "assistant", "content": "c"}
CALL = {"name": "add", "arguments": {"a": 2}}


def sharegpt(messages):
    names = {"user": "human", "assistant": "gpt", "tool": "observation"}
    return [{"from": names.get(one["role"], one["role"]), "value": one["content"]} for one in messages]


def contents(parsed):
    return [(one.message, one.learnt) for one in parsed.contents]


EQUAL = {
    "ShareGPT": ({"conversations": sharegpt(TWO)}, {"messages": TWO}),
    "ShareGPT with a system text apart": ({"conversations": sharegpt(TWO[1:]), "system": "s"}, {"messages": TWO}),
    "conversations with roles": ({"conversations": TWO}, {"messages": TWO}),
    "ShareGPT with a call": (
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "4"},
                {"from": "gpt", "value": "four"},
            ]
        },
        {
            "messages": [
                *make_chats.stated("q"),
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
                {"role": "tool", "content": "4"},
                {"role": "assistant", "content": "four"},
            ]
        },
    ),
    "Alpaca": ({"instruction": "q", "input": "", "output": "a"}, {"messages": make_chats.stated("q", "a")}),
    "Alpaca with an input": ({"instruction": "q", "input": "i", "output": "a"}, {"src": "q\ni", "tgt": "a"}),
}
PAIR = {"chosen": [*BEFORE, GOOD], "rejected": [*BEFORE, BAD]}
PAIRS = {
    "a prompt of messages": {"prompt": BEFORE, "chosen": [GOOD], "rejected": [BAD]},
    "a prompt of messages twice": {**PAIR, "prompt": BEFORE},
    "UltraFeedback": {**PAIR, "prompt": "r", "messages": [*BEFORE, GOOD], "score_chosen": 9.0, "score_rejected": 1.0},
    "ShareGPT": {"conversations": sharegpt(BEFORE), "chosen": sharegpt([GOOD])[0], "rejected": sharegpt([BAD])[0]},
    "ShareGPT's lists": {"chosen": sharegpt([*BEFORE, GOOD]), "rejected": sharegpt([*BEFORE, BAD])},
    "texts": {"prompt": BEFORE, "chosen": "b", "rejected": "c"},
    "PaddleNLP": {"src": ["q", "r"], "tgt": ["a"], "response": ["c", "b"], "sort": [0, 1], "system": "s"},
}


@pytest.mark.parametrize("case", EQUAL)
def test_a_conversation_is_the_same_in_every_format(case):
    one, other = EQUAL[case]
    assert contents(conversation_of(one)) == contents(conversation_of(other))


@pytest.mark.parametrize("case", PAIRS)
def test_a_pair_is_the_same_in_every_format(case):
    assert contents(pair_of(PAIRS[case])) == contents(pair_of(PAIR))


def test_scores_of_a_pair_are_counted_as_not_read():
    about = {"score_chosen": 9.0, "chosen-rating": 5, "chosen-model": "m", "prompt_id": "x"}
    assert sorted(pair_of(PAIR | about).unread) == sorted(about)


MIXED = {
    "messages and conversations": ({"messages": TWO, "conversations": sharegpt(TWO)}, "conversations: seems"),
    "messages and Alpaca": ({"messages": TWO, "instruction": "q", "output": "a"}, "instruction: seems"),
    "src and Alpaca": ({"src": "q", "tgt": "a", "instruction": "q", "output": "a"}, "src: seems"),
    "half of Alpaca": ({"instruction": "q"}, "output: missing"),
    "the other half": ({"output": "q"}, "instruction: missing"),
    "half of a message": ({"conversations": [{"from": "human"}]}, r"conversations\[0\]: needs from and value"),
    "two names of a role": ({"conversations": [{"from": "gpt", "role": "user", "value": "a"}]}, "needs from and value"),
    "an unknown role": ({"conversations": [{"from": "alien", "value": "a"}]}, r"conversations\[0\].from: 'alien'"),
    "a role that is no text": ({"conversations": [{"from": ["gpt"], "value": "a"}]}, r"conversations\[0\].from"),
    "a call that is no JSON": ({"conversations": [{"from": "function_call", "value": "add(2)"}]}, "not valid JSON"),
    "SFT's line with two answers": (PAIR, r"chosen|src"),
    "arguments that are no JSON": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {**CALL, "arguments": "a=2"}}]}]},
        r"messages\[0\]: arguments of a call: not valid JSON",
    ),
    "arguments that are a list": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {**CALL, "arguments": "[2]"}}]}]},
        r"messages\[0\]: arguments of a call are no JSON object",
    ),
}
MIXED_PAIRS = {
    "two prompts": (
        {**PAIRS["texts"], "conversations": sharegpt(BEFORE)},
        "conversations: the prompt is in prompt, too",
    ),
    "another prompt": ({**PAIR, "prompt": "another"}, "prompt: is not the prompt that chosen begins with"),
    "another conversation": ({**PAIR, "messages": [*BEFORE, BAD]}, "messages: seems.*chosen and rejected"),
    "no prompt": ({"chosen": "b", "rejected": "c"}, "prompt: missing"),
    "no rejected": ({"prompt": "q", "chosen": "b"}, "rejected: needs an answer"),
    "two beginnings": ({"chosen": PAIR["chosen"], "rejected": [*BEFORE[:-1], BAD]}, "rejected: differs from chosen"),
    "an empty answer": ({"prompt": "q", "chosen": "b", "rejected": " "}, "rejected: needs an answer"),
    "two formats": ({**PAIR, **PAIRS["PaddleNLP"]}, "chosen, rejected: the line has response, sort, src"),
    "SFT's line": ({"conversations": sharegpt(TWO)}, "no two answers: this is SFT data"),
    "ms-swift": (
        {"prompt": "q", "chosen": "b", "rejected": "c", "rejected_response": "d"},
        "rejected_response: seems.*once",
    ),
}


@pytest.mark.parametrize(("line", "fault"), MIXED.values(), ids=MIXED)
def test_a_mixed_or_half_given_conversation_is_refused(line, fault):
    with pytest.raises(UserError, match=fault):
        conversation_of(line)


@pytest.mark.parametrize(("line", "fault"), MIXED_PAIRS.values(), ids=MIXED_PAIRS)
def test_a_mixed_or_half_given_pair_is_refused_with_a_remedy_for_dpo(line, fault):
    with pytest.raises(UserError, match=fault) as refused:
        pair_of(line)
    assert "--task dpo" not in str(refused.value)


VALUE = st.recursive(
    st.sampled_from([None, "", "q", 1, [], {}, *TWO, *sharegpt(TWO), TWO, sharegpt(TWO)]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["from", "value", "role", "content"]), inner, max_size=3)
    ),
    max_leaves=4,
)
KEYS = ["messages", "conversations", "instruction", "input", "output", "src", "tgt", "prompt", "chosen", "rejected"]


@given(st.dictionaries(st.sampled_from(KEYS), VALUE, max_size=4))
def test_any_mixture_is_a_conversation_or_refused(line):
    for read in (conversation_of, pair_of):
        try:
            found = read(line)
        except UserError as error:
            assert len(error.faults) == 1
        else:
            assert {one.field.split("[")[0] for one in found.contents} <= line.keys()
