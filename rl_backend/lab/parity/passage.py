"""English text that models with a tokenizer are compared on."""

PASSAGE = """\
The ferry left the island an hour before sunrise, because the captain wanted to be across the strait before
the wind turned. There were eleven passengers: a baker with two empty crates, a school class of six with their
teacher, a surveyor, and an old woman who had brought nothing but a kettle. Nobody spoke until the lighthouse
was behind them.

"How deep is it here?" asked one of the children.

"Forty metres," said the surveyor. "In the middle it is about three times as much. If you dropped a stone now,
it would need almost a minute to reach the ground."

The child looked over the railing and began to count. At 52 she stopped and nodded, as if she had heard it
arrive.

Question: A shop sells pencils at 12 cents each and notebooks at 85 cents each. How much do 5 pencils and 2
notebooks cost?
Answer: The pencils cost 5 * 12 = 60 cents, the notebooks 2 * 85 = 170 cents. Together that is 230 cents, or
$2.30.

To make the soup, wash a kilogram of leeks and cut them into rings. Fry an onion in butter, add the leeks and
three potatoes, then pour in a litre of stock. Let it simmer for 25 minutes. Season with salt, pepper and a
little nutmeg, and serve it with bread.

def mean(values):
    if not values:
        raise ValueError("mean of nothing")
    return sum(values) / len(values)

The Moon keeps one face towards the Earth since both bodies raise tides in each other. Billions of years ago
it turned faster; friction slowed it down until one turn took exactly as long as one orbit. The same will
happen to the Earth one day, although the Sun may end before.

Dear Maria,
thank you for the photographs. I have hung the one of the orchard above my desk, where I see it when I should
be working. We plan to visit in October, if the trains are running again by then. Could you ask your brother
whether the small room is free? Please do not cook for us on the first evening; we will be late, and the
children only eat toast.
With love, Anna

In 1889 the town had 4,200 inhabitants, two mills and a brewery. Thirty years later the railway had come, the
brewery employed more people than the mills, and the population had tripled. What is left of that time is the
station, a brick building with a clock that is always seven minutes slow, and a street whose name nobody can
explain.
"""
