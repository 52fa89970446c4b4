extends "res://addons/godot_rl_agents/controller/ai_controller_2d.gd"
## The demo rolling_ball as an agent of godot_rl_agents, with the observations, actions and rewards of the demo.

const WIDTH := 400.0
const MARGIN := 40.0
const FORCE := 400.0
const FAST := 300.0
const GOAL_RADIUS := 50.0
const MAX_TICKS := 480

var ticks := 0
var distance := 0.0
var root: Node2D = null
var ball: RigidBody2D = null
var goal: Node2D = null


func _ready() -> void:
	super()
	root = get_parent()
	ball = root.get_node("Ball")
	goal = root.get_node("Goal")
	begin()


func begin() -> void:
	var start := _anywhere()
	goal.position = _anywhere()
	while goal.position.distance_to(start) < 3 * GOAL_RADIUS:
		goal.position = _anywhere()
	var there := root.global_transform * Transform2D(0.0, start)
	var _old := ball.global_transform
	ball.global_transform = there
	PhysicsServer2D.body_set_state(ball.get_rid(), PhysicsServer2D.BODY_STATE_TRANSFORM, there)
	ball.linear_velocity = Vector2.ZERO
	ball.angular_velocity = 0.0
	ball.constant_force = Vector2.ZERO
	needs_reset = false
	ticks = 0
	distance = goal.position.distance_to(start)


func get_obs() -> Dictionary:
	var at := ball.position / WIDTH
	var to := goal.position / WIDTH
	var speed := ball.linear_velocity / FAST
	return {"obs": [2 * at.x - 1, 2 * at.y - 1, speed.x, speed.y, to.x - at.x, to.y - at.y]}


func get_reward() -> float:
	return reward


func get_action_space() -> Dictionary:
	return {"push": {"size": 2, "action_type": "continuous"}}


func set_action(action) -> void:
	var push: Array = action["push"]
	ball.constant_force = FORCE * Vector2(clampf(push[0], -1, 1), clampf(push[1], -1, 1))


func _physics_process(_delta: float) -> void:
	if needs_reset:
		begin()
		return
	var before := distance
	distance = goal.position.distance_to(ball.position)
	ticks += 1
	reward += (before - distance) / WIDTH - 0.001
	if distance < GOAL_RADIUS:
		reward += 1.0
		done = true
		begin()
	elif ticks >= MAX_TICKS:
		done = true
		begin()


func _anywhere() -> Vector2:
	return Vector2(randf_range(MARGIN, WIDTH - MARGIN), randf_range(MARGIN, WIDTH - MARGIN))
