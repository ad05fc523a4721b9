"""What pays: how much to draft where the request says "auto".

Its constants, and what speaks for each: the speed of "auto" in percent, with the constant halved and doubled
(`experiments/simulate_auto.py --each-constant`). First with a drafter that is good at every other suite, where
standard errors are 1 to 2 percent, then with kernels that take as long for three tokens as for one, where they are
0.3. Where figures are within these errors, any value near it does.

| constant | first | then | what it is, and what else speaks for it |
|---|---|---|---|
| `acceptance.MEMORY` | +2, +3 | 0, 0 | drafts; a test follows a text that gets harder |
| `acceptance.PRECISION` | +2, +2 | 0, 0 | in drafts: how long the drafter is taken at its word |
| `acceptance.EDGE` | +2, +1 | 0, 0 | at a tenth, one surprise among 6,000 drafts turns the line (a test) |
| `costs.ROUNDS` | +2, +2 | +1, 0 | learned at once; alone as shrinkage: at 0 a steady drafter loses 0.5 to 1 percent |
| `costs.HICCUP` | -20, +1 | -18, 0 | what a round takes beyond is no cost |
| `costs.CENTERS` | +2, 0 | 0, 0 | bounds memory and the time of a prediction |
| `costs.MEMORY` | 0, 0 | 0, 0 | rounds; a test makes drafts dearer after 2,000 rounds |
| `policies.MEMORY` | +4, -3 | -1, +1 | rounds; between a text that changes and one that stays |
| `policies.FEW` | +4, 0 | 0, 0 | at 4, a drafter that never pays for itself costs 2 percent more |
| `policies.RARE` | +6, -3 | 0, 0 | at 64, a drafter that is never right costs 0.4 percent more |
| `policies.ERROR` | +4, +3 | 0, 0 | a test counts drafters that pay a little and are given up by bad luck |
| `policies.TRUSTED` | | | tokens; at 8 and 20 recorded texts with copies are as fast, within 0.1 percent |
| `policies.MAX_AUTO_NODES` | | | the measured trees of 64 nodes are slower than those of 32 |
"""
