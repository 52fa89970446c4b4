tool
class_name EnvManagerTraining, "res://addons/envmanager/icons/training.svg"
extends Resource
# How this game is trained: how long, in how many copies, who learns when, and the parameters of its episodes.
#
# The field `training` of the arena refers to it. A field that is left as it is here leaves the choice to the trainer.
# A config of the training wins over the scene.

# How many steps of agents the training takes. 0: 100000.
export(int, 0, 1000000000) var steps = 0
# The same seed repeats the training, if it waits for all engines.
export(int, 0, 1000000) var random_seed = 0
# How many copies of the scene play. 0: 1.
export(int, 0, 65536) var environments = 0
# How many engines play them. 0: 1.
export(int, 0, 256) var engines = 0
# How many ticks of the physics an action lasts. 0: 4.
export(int, 0, 1000) var ticks_per_action = 0
# Which engines the trainer waits for in each step: any of them, or all.
export(String, "", "any", "all") var wait = ""
# Whether info() of the agents travels. Lessons that end by a number of it need this.
export(bool) var infos = false
# How many steps of every environment a round lasts, in which the same behaviors learn. 0: no rounds.
export(int, 0, 65536) var round_steps = 0
# Who learns in each round: ["hero", "hero", "target"]; "hero, target" for both.
export(PoolStringArray) var round_learners = PoolStringArray()
# How many steps of agents lie between checkpoints. 0: there is one at the end.
export(int, 0, 1000000000) var checkpoint_every = 0
# How many episodes are played at the end to judge the policies. -1: 100.
export(int, -1, 65536) var evaluation_episodes = -1
# What the game reads by the arena's parameter(), and how each episode draws it.
export(Array, Resource) var parameters = []
# Any other options of the table `training` of a config, by their names: {"keep": 10}.
export(Dictionary) var more = {}
# Any other options of its table `manager`: {"engine": {"isolate": true}}.
export(Dictionary) var manager = {}
